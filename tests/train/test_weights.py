"""Weights that a run begins with: of another model, another type, another vocabulary, a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config import RunConfig
from megalite.config.resume import accepted
from megalite.errors import CheckpointError, ConfigError
from megalite.exchange.export import export
from megalite.exchange.folder import open_folder, open_weights
from megalite.train.start_checks import require_resumable, start_problems
from tests.exchange.kit import edit
from tests.pool import RankPool
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    VOCAB,
    checkpoint_tensors,
    make_config,
    train,
    train_one,
    world_size,
    write_tokens,
)

TINY: dict[str, Any] = {"model__num_layers": 1, "train__steps": 0}
THETA = "model.rope_theta is 5.0, saved with 10000.0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """Runs "a" and "wide" (float64), and "hf", "other": folders in bfloat16 of two seeds."""
    folder = tmp_path_factory.mktemp("weights")
    write_tokens(folder / "data", 3 * GLOBAL_BATCH)
    jobs = [
        (make_config(folder, "a", **TINY), None),
        (make_config(folder, "b", **TINY, train__seed=3), None),
        (make_config(folder, "wide", **TINY, train__dtype="float64"), None),
    ]
    (outcomes,) = pool.run(train, 1, jobs)
    assert [outcome.code for outcome in outcomes] == [0] * 3
    export(open_weights(str(folder / "a")), folder / "hf", dtype="bfloat16")
    export(open_weights(str(folder / "b")), folder / "other", dtype="bfloat16")
    return folder


def run(
    pool: RankPool, config: RunConfig, accept: str = "", stop: int | None = None
) -> tuple[str, list[str]]:
    """The error on all ranks ("" for none), and the lines of the run's log."""
    outcomes = pool.run(train_one, world_size(config), config, stop, accept)
    assert len({outcome.error for outcome in outcomes}) == 1
    log = config.folder / "log.txt"
    return outcomes[0].error, log.read_text().splitlines() if log.exists() else []


def start(
    folder: Path, name: str, source: str, layout: str = "serial", **changes: Any
) -> RunConfig:
    options = {**TINY, "checkpoint__load_weights": source, **changes}
    return make_config(folder, name, layout, **options)


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_another_function_needs_the_users_word(pool: RankPool, folder: Path, prefix: str) -> None:
    source = f"{prefix}{folder / ('hf' if prefix else 'a')}"
    changes = {"model__rope_theta": 5.0, "model__sliding_window": 7, "model__norm_eps": 1e-5}
    config = start(folder, f"theta-{len(prefix)}", source, "dp2", **changes)
    error, _ = run(pool, config)
    window = "model.sliding_window is 7, saved with"
    assert THETA in error
    assert window in error
    assert error.endswith("all the same with --accept model.rope_theta,model.sliding_window")
    with pytest.raises(CheckpointError) as early:  # before torch is imported
        require_resumable(config, frozenset())
    assert THETA in str(early.value)

    accept = "model.rope_theta,model.sliding_window"
    require_resumable(config, accepted([accept]))
    error, log = run(pool, config, accept)
    assert error == ""
    assert f"accepted: {THETA}" in log


def test_only_settings_of_the_function_can_be_accepted() -> None:
    with pytest.raises(ConfigError, match=r"--accept model\.num_layers: cannot change"):
        accepted(["model.num_layers,model.rope_theta"])


def test_other_padding_and_a_wider_source(pool: RankPool, folder: Path) -> None:
    """Rows that pad are 0, all others are the source's."""
    source = str(folder / "wide")
    config = start(folder, "padded", source, "tp2", model__vocab_pad_multiple=64)
    error, log = run(pool, config)
    assert error == ""
    assert "weights are float64, narrowed to float32" in log
    before, after = checkpoint_tensors(folder / "wide", 0), checkpoint_tensors(folder / "padded", 0)
    for name in [name for name in after if name.startswith("param/")]:
        if after[name].shape != before[name].shape:
            assert after[name].shape[0] == 128
            assert not after[name][VOCAB:].any()
            assert torch.equal(after[name][:VOCAB], before[name][:VOCAB].float())
        else:
            assert torch.equal(after[name], before[name].float())


@pytest.mark.parametrize("layout", ["serial", "tp2", "zero1"])
def test_a_vocabulary_that_grows(pool: RankPool, folder: Path, layout: str) -> None:
    """New rows are the mean, to the same bits at every layout; fewer rows are refused."""
    config = start(folder, f"grown-{layout}", str(folder / "a"), layout, model__vocab_size=110)
    error, log = run(pool, config, "model.vocab_size")
    assert error == ""
    grown = f"vocabulary of {VOCAB} grows by 13 tokens, whose rows are the mean of the others"
    assert grown in log
    before = checkpoint_tensors(folder / "a", 0)
    after = checkpoint_tensors(folder / config.name, 0)
    for name in ("param/embedding.weight", "param/head.weight"):
        mean = before[name][:VOCAB].double().mean(0).float()
        assert (after[name][VOCAB:110] - mean).abs().max() <= 1e-7
        assert not after[name][110:].any()
        serial = checkpoint_tensors(folder / "grown-serial", 0)[name]
        assert torch.equal(after[name], serial)
    fewer = start(folder, f"fewer-{layout}", str(config.folder), layout)
    error, _ = run(pool, fewer, "model.vocab_size")
    assert "has 110 tokens in" in error
    assert "a vocabulary can grow, not shrink" in error


def test_a_run_that_began_from_a_folder_resumes(pool: RankPool, folder: Path) -> None:
    """The same folder, also where it lies now; another one is refused with both names."""
    source = f"hf:{folder / 'hf'}"
    config = start(folder, "from-hf", source, train__steps=4)
    assert start_problems(config) == []
    error, log = run(pool, config, stop=1)
    assert error == ""
    assert f"weights from {folder / 'hf'}, everything else new" in log
    assert "weights are bfloat16, widened to float32" in log

    _, log = run(pool, config, stop=2)
    assert f"resumes from step 1; checkpoint.load_weights={source} was read at step 0" in log
    moved = Path(shutil.copytree(folder / "hf", folder / "moved"))
    again = start(folder, "from-hf", f"hf:{moved}", train__steps=4)
    require_resumable(again, frozenset())
    other = start(folder, "from-hf", f"hf:{folder / 'other'}", train__steps=4)
    with pytest.raises(CheckpointError) as caught:
        require_resumable(other, frozenset())
    assert f"checkpoint.load_weights=hf:{folder / 'other'} would not be read" in str(caught.value)
    assert f"its run began from {source}" in str(caught.value)

    # The run's own export has what the folder had beside its weights.
    edit(folder / "hf", bos_token_id=9)
    run(pool, start(folder, "ids", source, train__steps=0))
    export(open_weights(str(folder / "ids")), folder / "ids-out")
    assert open_folder(folder / "ids-out").manifest.state["source"]["config"]["bos_token_id"] == 9  # type: ignore[index,call-overload]


def test_a_folder_that_cannot_be_read_is_refused_before_processes_start(folder: Path) -> None:
    config = start(folder, "none", f"hf:{folder / 'nothing'}")
    (problem,) = start_problems(config)
    assert problem.endswith("nothing is no folder; give one with config.json and model.safetensors")
    shutil.copytree(folder / "hf", folder / "bad")
    edit(folder / "bad", hidden_act="relu", extra=1)
    assert [
        line.split(" = ")[0] for line in start_problems(start(folder, "x", f"hf:{folder / 'bad'}"))
    ] == [
        "config.json: hidden_act",
        "config.json: extra",
    ]


def test_weights_alone_are_no_run_to_resume(pool: RankPool, folder: Path) -> None:
    from megalite.exchange.convert import convert

    config = make_config(folder, "weights-run", **TINY)
    convert(open_folder(folder / "hf"), config.folder / "checkpoints" / "step-00000000")
    error, _ = run(pool, config)
    assert "holds weights alone, no run to resume" in error
    with pytest.raises(CheckpointError, match="holds weights alone, no run to resume"):
        require_resumable(config, frozenset())
