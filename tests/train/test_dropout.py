"""Dropout through the trainer: no layout, resume, microbatch size or generator state changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint.find import find_checkpoint
from megalite.config import RunConfig
from megalite.corpus.indexed_writer import IndexedWriter
from megalite.generate.generate import Text, generate, load_model
from tests.pool import RankPool
from tests.tolerances import PARITY_FLOAT64
from tests.train.kit.runs import (
    SEQ_LENGTH,
    VOCAB,
    checkpoint_tensors,
    different,
    lines,
    losses,
    make_config,
    make_trainer,
    step_numbers,
    train,
    world_size,
    write_tokens,
)

pytestmark = pytest.mark.long

STEPS = 4
GPT2: dict[str, Any] = {
    "model__family": "gpt2",
    "model__num_kv_heads": None,
    "model__max_positions": 16,
    "train__steps": STEPS,
}
LLAMA: dict[str, Any] = {
    f"model__{kind}_dropout": 0.2 for kind in ("embedding", "attention", "residual")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dropout")
    write_tokens(path / "data", 12)
    return path


def run(pool: RankPool, config: RunConfig, *stops: int | None) -> None:
    for outcomes in pool.run(train, world_size(config), [(config, stop) for stop in stops]):
        assert [o.error for o in outcomes] == [""] * len(stops)


@pytest.fixture(scope="module")
def serial(pool: RankPool, folder: Path) -> dict[str, Path]:
    """Runs in one process in float64, with and without dropout."""
    off: dict[str, Any] = dict.fromkeys(LLAMA, 0.0)
    for name, changes in (("dropped", {}), ("plain", off)):
        run(pool, make_config(folder, name, train__dtype="float64", **{**GPT2, **changes}), None)
    return {name: folder / name for name in ("dropped", "plain")}


def test_dropout_is_on(serial: dict[str, Path]) -> None:
    dropped, plain = (losses(serial[name]) for name in ("dropped", "plain"))
    assert all(abs(a - b) > 1e-4 for a, b in zip(dropped, plain, strict=True))


def test_each_step_has_masks_of_its_own(pool: RankPool, folder: Path) -> None:
    """Weights and data stand still, so only the masks can change the loss from step to step."""
    with IndexedWriter(folder / "same" / "data", VOCAB) as writer:
        writer.add_document(np.full(12 * SEQ_LENGTH + 1, 5))
        writer.publish()
    still: dict[str, Any] = {
        "optimizer__lr": 0.0,
        "optimizer__warmup_steps": 0,
        "optimizer__weight_decay": 0.0,
    }
    off: dict[str, Any] = dict.fromkeys(LLAMA, 0.0)
    for name, changes in (("still-dropped", {}), ("still-plain", off)):
        config = make_config(folder / "same", name, **{**GPT2, **still, **changes})
        run(pool, config, 2, None)  # around a resume, too
    assert len(set(losses(folder / "same" / "still-plain"))) == 1
    assert len(set(losses(folder / "same" / "still-dropped"))) == STEPS


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("tp2", {"parallel__sequence_parallel": True, "train__recompute": "full"}),
        ("interleaved", {"train__micro_batch": 2}),
        ("dp2", {"train__micro_batch": 2, "train__recompute": "selective"}),
        ("tp2xpp2", {"parallel__tp": 2, "parallel__pp": 2}),
    ],
)
def test_masks_do_not_depend_on_the_layout(
    pool: RankPool, folder: Path, serial: dict[str, Path], layout: str, changes: dict[str, Any]
) -> None:
    base = "serial" if layout == "tp2xpp2" else layout
    config = make_config(folder, f"at-{layout}", base, train__dtype="float64", **GPT2, **changes)
    run(pool, config, None)
    same_numbers(folder / config.name, serial["dropped"])


def same_numbers(found: Path, wanted: Path) -> None:
    """Losses and the last checkpoint agree as two layouts in float64 do."""
    assert losses(found) == pytest.approx(losses(wanted), rel=PARITY_FLOAT64)
    end = checkpoint_tensors(found, STEPS)
    for key, tensor in checkpoint_tensors(wanted, STEPS).items():
        assert (tensor - end[key]).abs().max() < PARITY_FLOAT64, key


def test_a_run_that_moves_to_another_layout_keeps_its_masks(
    pool: RankPool, folder: Path, serial: dict[str, Path]
) -> None:
    exact: dict[str, Any] = {"train__dtype": "float64", **GPT2}
    before = make_config(folder, "moved", parallel__tp=2, parallel__pp=2, **exact)
    after = make_config(folder, "moved", "zero1", train__micro_batch=2, **exact)
    run(pool, before, 2)
    run(pool, after, None)
    assert [line["step"] for line in lines(folder / "moved", "restart")] == [2]
    same_numbers(folder / "moved", serial["dropped"])


@pytest.mark.parametrize(
    ("family", "dtype"), [("gpt2", "bfloat16"), ("gpt2", "float32"), ("llama", "float32")]
)
def test_resume_is_bitwise_with_dropout_at_tp2_pp2(
    pool: RankPool, folder: Path, family: str, dtype: str
) -> None:
    model = GPT2 if family == "gpt2" else {**LLAMA, "train__steps": STEPS}
    layout: dict[str, Any] = {"parallel__tp": 2, "parallel__pp": 2, "train__dtype": dtype}
    name = f"{family}-{dtype}"
    straight = make_config(folder, f"{name}-straight", **layout, **model)
    stopped = make_config(folder, f"{name}-stopped", **layout, **model)
    run(pool, straight, None)
    run(pool, stopped, 1, 3, None)
    wanted, found = folder / straight.name, folder / stopped.name
    assert [line["step"] for line in lines(found, "restart")] == [1, 3]
    assert step_numbers(found) == step_numbers(wanted)
    assert different(checkpoint_tensors(found, STEPS), checkpoint_tensors(wanted, STEPS)) == []


def generator_states(ctx: Any, config: RunConfig) -> list[bool]:
    """Whether torch's generator is as it was, after making the trainer and after its run."""
    torch.manual_seed(100 + ctx.rank)  # as different as ranks can be
    before = torch.get_rng_state()
    trainer = make_trainer(ctx, config)
    made = torch.equal(torch.get_rng_state(), before)
    trainer.run()
    return [made, torch.equal(torch.get_rng_state(), before)]


def test_generators_of_the_ranks_play_no_part(
    pool: RankPool, folder: Path, serial: dict[str, Path]
) -> None:
    """Every rank has another generator state: the losses are those of one process all the same,
    and no state is touched."""
    config = make_config(folder, "states", "tp2", train__dtype="float64", **GPT2)
    assert pool.run(generator_states, 2, config) == [[True, True]] * 2
    assert losses(folder / "states") == pytest.approx(losses(serial["dropped"]), rel=PARITY_FLOAT64)


def test_a_run_with_dropout_generates_without(serial: dict[str, Path]) -> None:
    """The same text each time, and logits that do not change from call to call."""
    model, _ = load_model(find_checkpoint(serial["dropped"]))
    assert model.config.family == "gpt2"
    assert model.config.has_dropout
    texts = [[token for _, token in generate(model, [Text([1, 2, 3], 20)])] for _ in range(2)]
    assert len(texts[0]) == 20  # beyond the context of 16 tokens
    assert texts[0] == texts[1]
    tokens = torch.arange(16)
    assert torch.equal(model.logits(tokens), model.logits(tokens))


def test_evaluation_drops_nothing(pool: RankPool, folder: Path) -> None:
    """The validation loss of untrained weights is that of the same weights without dropout."""
    settings: dict[str, Any] = {
        **GPT2,
        "train__steps": 1,
        "data__split": (0.5, 0.5),
        "optimizer__lr": 0.0,
    }
    options = {"eval__interval": 1, "optimizer__warmup_steps": 0, "optimizer__weight_decay": 0.0}
    off: dict[str, Any] = dict.fromkeys(LLAMA, 0.0)
    found = []
    for name, changes in (("eval-dropped", {}), ("eval-plain", off)):
        run(pool, make_config(folder, name, **{**settings, **options, **changes}), None)
        found.append([line["loss"] for line in lines(folder / name, "eval")])
    assert found[0]
    assert found[0] == found[1]
    assert losses(folder / "eval-dropped") != losses(folder / "eval-plain")
