"""Settings changed on purpose at a resume: listed, accepted, logged; the run goes on from there."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch

from megalite.checkpoint.shard_file import read_shard
from megalite.config import RunConfig, TrainConfig
from megalite.config.names import keys
from megalite.config.resume import HORIZON, accepted, may_change
from megalite.distributed.equality import require_same_config
from megalite.errors import ConfigError, MegaliteError
from megalite.run.batch_plan import BatchStage, batch_plan
from megalite.train.changes import changed_settings
from megalite.train.loop import Trainer
from tests.pool import RankPool
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    LAYOUTS,
    checkpoint_tensors,
    lines,
    make_config,
    train,
    train_one,
    write_tokens,
)

PLACES = ("out", "data.path")  # the folder is a copy


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """Data and a run that stopped at step 2 of 6."""
    folder = tmp_path_factory.mktemp("changes")
    write_tokens(folder / "data", 5 * GLOBAL_BATCH)
    pool.run(train, 1, [(make_config(folder, "run"), 2)])
    return folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "copy"))


def resumed(ctx: Any, folder: Path, accept: str, changes: dict[str, Any]) -> tuple[Any, list[int]]:
    """Runs in a rank: (exit code or error, sample ids read)."""
    config = make_config(folder, "run", **changes)
    seen: list[int] = []
    try:
        trainer = Trainer(config, ctx.mesh(), accept=accepted([accept]))
        read = trainer._micro_batches

        def listen() -> Any:
            batches = read()
            seen.extend(number for batch in batches for number in batch.sample_ids.tolist())
            return batches

        trainer._micro_batches = listen
        return trainer.run(), seen
    except MegaliteError as error:
        return str(error), seen


def test_accepted_changes_take_effect_and_are_logged(pool: RankPool, folder: Path) -> None:
    changes = {
        "optimizer__lr": 5e-3,
        "train__global_batch": 2 * GLOBAL_BATCH,
        "train__micro_batch": 2,
    }
    ((error, seen),) = pool.run(resumed, 1, folder, "optimizer.lr", changes)
    assert "train.global_batch is 8, saved with 4" in error
    assert "--accept optimizer.lr,train.global_batch" in error
    assert "optimizer.lr is" not in error
    assert seen == []
    names = "optimizer.lr,train.global_batch,train.seed"
    ((code, seen),) = pool.run(resumed, 1, folder, names, changes)
    assert code == 0

    run = folder / "run"
    (restart,) = lines(run, "restart")
    assert (restart["step"], restart["attempt"]) == (2, 2)
    assert [change for change in restart["changed"] if change["key"] not in PLACES] == [
        {"key": "optimizer.lr", "old": 1e-2, "new": 5e-3, "accepted": True},
        {"key": "train.global_batch", "old": 4, "new": 8, "accepted": True},
        {"key": "train.micro_batch", "old": 1, "new": 2, "accepted": False},
    ]
    log = (run / "log.txt").read_text()
    assert "accepted: optimizer.lr is 0.005, saved with 0.01\n" in log
    assert "--accept train.seed: not changed\n" in log
    steps = lines(run, "step")
    assert [line["global_batch"] for line in steps] == [4, 4, 8, 8, 8, 8]
    assert [line["consumed_samples"] for line in steps] == [4, 8, 16, 24, 32, 40]
    assert steps[1]["lr"] == 1e-2
    assert steps[2]["lr"] == 5e-3
    # nothing is left out or read twice around the change: two epochs of 20 samples in all
    ((first, before),) = pool.run(read_by_another, 1, folder)
    assert first == 75
    flat = before + seen
    assert sorted(flat[:20]) == sorted(flat[20:]) == list(range(20))

    # once saved, the new settings are the run's
    ((code, _),) = pool.run(resumed, 1, folder, "", {**changes, "log__interval": 9})
    assert code == 0
    log = (run / "log.txt").read_text()
    assert log.count("log.interval=9 is more than the run's 6 steps: only the last step has a") == 1
    assert [change["key"] for change in lines(run, "restart")[-1]["changed"]] == ["log.interval"]


def read_by_another(ctx: Any, folder: Path) -> tuple[Any, list[int]]:
    """The samples of the first two steps, read again by a run of its own."""
    (outcome,) = train(ctx, [(make_config(folder, "again"), 2)])
    return outcome.code, [sample for step in range(2) for sample in outcome.sample_ids[step]]


def test_all_listed_accepts_other_data_but_never_another_model(
    pool: RankPool, folder: Path
) -> None:
    write_tokens(folder / "data", 5 * GLOBAL_BATCH, seed=1)
    ((error, _),) = pool.run(resumed, 1, folder, "", {})
    assert "data is " in error
    assert "its content is another now" in error
    assert error.endswith("with --accept data")
    ((error, _),) = pool.run(resumed, 1, folder, "all-listed", {"model__ffn_hidden_size": 64})
    assert "model.ffn_hidden_size is 64, saved with 48 (cannot change within a run)" in error
    assert "--accept" not in error
    ((code, _),) = pool.run(resumed, 1, folder, "all-listed", {"train__seed": 5})
    assert code == 0
    (restart,) = lines(folder / "run", "restart")
    keys = [change["key"] for change in restart["changed"]]
    assert [key for key in keys if key not in PLACES] == ["train.seed", "data"]


@pytest.mark.long
def test_a_wsd_plateau_may_be_made_longer_until_it_ends(pool: RankPool, folder: Path) -> None:
    wsd: dict[str, Any] = {
        "optimizer__lr_schedule": "wsd",
        "optimizer__wsd_decay_steps": 2,
        "train__steps": 6,
    }
    ((code, _),) = pool.run(resumed, 1, folder, "all-listed", wsd)
    assert code == 0
    ((error, _),) = pool.run(resumed, 1, folder, "", {**wsd, "train__steps": 9})
    assert (
        "train.steps is 9, saved with 6 (the learning rate's decay ends after 6 steps, at 0)"
        in error
    )
    shutil.rmtree(folder / "run")
    pool.run(train, 1, [(make_config(folder, "run", **wsd), 4)])
    ((code, _),) = pool.run(resumed, 1, folder, "", {**wsd, "train__steps": 9})
    assert code == 0
    rates = [line["lr"] for line in lines(folder / "run", "step")]
    assert rates[1:8] == [1e-2] * 7
    assert rates[8] < 1e-2


def test_the_length_saved_is_that_of_the_batches_the_run_really_had() -> None:
    """A second change after a changed batch compares the decay with the one that was trained."""
    tokens: dict[str, Any] = {
        "train__steps": 0,
        "train__global_batch": 8,
        "optimizer__lr_schedule": "cosine",
    }
    folder = Path("runs")
    old = make_config(folder, "run", train__tokens=64 * 16, **tokens)
    past = [BatchStage(0, 0, 4), BatchStage(4, 16, 8)]  # ten steps, not eight
    new = make_config(folder, "run", train__tokens=80 * 16, optimizer__decay_steps=10, **tokens)
    found = changed_settings(old, new, batch_plan(new, past, 6), 6)
    assert {change.name: change.needs for change in found} == dict.fromkeys(
        ("train.steps", "train.tokens", "optimizer.decay_steps"), "free"
    )


DTYPES = get_args(TrainConfig.model_fields["dtype"].annotation)
MUON = {"optimizer.name": "muon"}
WSD = {"optimizer.lr_schedule": "wsd", "optimizer.wsd_decay_steps": 2}
WSD_TOKENS = {"optimizer.lr_schedule": "wsd", "optimizer.wsd_decay_tokens": 128}
HALF = {"train.dtype": "float16"}
RAMP = {
    "train.batch_ramp_start": 2,
    "train.batch_ramp_increment": 1,
    "train.batch_ramp_samples": 8,
}
RAMP_TOKENS = {**RAMP, "train.batch_ramp_samples": None, "train.batch_ramp_tokens": 128}
ABOVE_0 = {"optimizer.min_lr": 1e-3}  # or a decay that ends early is refused
NO_WARMUP = {"optimizer.warmup_steps": 0}
ALL_ADAMW = [{"match": "*", "algorithm": "adamw"}]

# Each setting that may be accepted: what else the two runs have, and two values of it.
PACKED = {"data.packing": "documents", "data.document_masks": True}
LEARNED = {
    "model.positions": "learned",
    "model.max_positions": 16,
    "data.document_masks": True,
}
PAIRS: list[tuple[str, dict[str, Any], Any, Any]] = [
    *((f"model.{kind}_dropout", {}, 0.0, 0.1) for kind in ("embedding", "attention", "residual")),
    ("optimizer.lr", {}, 1e-2, 5e-3),
    ("optimizer.min_lr", {}, 0.0, 1e-3),
    ("optimizer.lr_schedule", {}, "cosine", "linear"),
    ("optimizer.warmup_steps", {}, 2, 1),
    ("optimizer.warmup_tokens", NO_WARMUP, None, 64),
    ("optimizer.decay_steps", ABOVE_0, None, 5),
    ("optimizer.decay_tokens", ABOVE_0, None, 320),
    ("optimizer.wsd_decay_steps", WSD, 2, 3),
    ("optimizer.wsd_decay_tokens", WSD_TOKENS, 128, 192),
    ("optimizer.wsd_decay_shape", WSD, "1-sqrt", "linear"),
    ("optimizer.beta1", {}, 0.9, 0.8),
    ("optimizer.beta2", {}, 0.95, 0.9),
    ("optimizer.eps", {}, 1e-8, 1e-7),
    ("optimizer.weight_decay", {}, 0.1, 0.0),
    ("optimizer.groups", {}, [], [{"match": "*", "lr_scale": 0.5}]),
    ("optimizer.groups", MUON, [], ALL_ADAMW),
    ("optimizer.ema_decay", {}, None, 0.5),
    ("optimizer.ema_decay", {}, 0.9, 0.5),
    ("optimizer.grad_reduce_dtype", {"parallel.dp": 2}, "float32", "bfloat16"),
    ("optimizer.loss_scale", HALF, 65536.0, 1024.0),
    ("optimizer.loss_scale_min", HALF, 1.0, 2.0),
    ("optimizer.loss_scale_interval", HALF, 1000, 2),
    ("optimizer.loss_scale_hysteresis", HALF, 2, 1),
    ("optimizer.loss_scale_backoff", HALF, 0.5, 0.25),
    ("optimizer.muon_momentum", MUON, 0.95, 0.9),
    ("optimizer.muon_nesterov", MUON, True, False),
    ("optimizer.muon_steps", MUON, 5, 3),
    ("optimizer.muon_scale", MUON, "adamw_rms", "spectral"),
    ("optimizer.muon_dtype", MUON, "float32", "bfloat16"),
    ("optimizer.clip_grad", {}, 1.0, None),
    ("data.document_masks", {}, False, True),
    ("data.split", {}, (1.0, 0.0), (0.9, 0.1)),
    ("data.split_at", {}, "token", "document"),
    ("data.long_documents", PACKED, "truncate", "drop"),
    ("data.eod_mask_loss", {}, False, True),
    ("data.reset_positions", LEARNED, False, True),
    ("train.steps", {}, 6, 5),
    ("train.tokens", {"train.steps": 0}, 384, 320),
    ("train.global_batch", {}, 4, 2),
    ("train.batch_ramp_start", RAMP, 2, 1),
    ("train.batch_ramp_increment", RAMP, 1, 2),
    ("train.batch_ramp_samples", RAMP, 8, 12),
    ("train.batch_ramp_tokens", RAMP_TOKENS, 128, 192),
    ("train.seed", {}, 1, 2),
    *(("train.dtype", {}, one, other) for one, other in itertools.combinations(DTYPES, 2)),
    ("train.z_loss", {}, 0.0, 1e-4),
    ("train.label_smoothing", {}, 0.0, 0.1),
]


def test_the_pairs_are_all_settings_that_may_be_accepted() -> None:
    listed = {name for name in keys() if may_change(name) == "accept"}
    # Blends are in test_blend_position.py, and TF32 has no effect on a CPU.
    assert {name for name, *_ in PAIRS} == listed - {"data.sources", "data.weights", "train.tf32"}


def changed_both_ways(
    ctx: Any, folder: Path, name: str, rest: dict[str, Any], *values: Any
) -> list[tuple[Any, ...]]:
    """Runs in a rank: saves with one value, resumes with the other; codes or errors."""
    found = []
    for run, (one, other) in {"there": values, "back": values[::-1]}.items():
        options = {k.replace(".", "__"): v for k, v in {"model.num_layers": 1, **rest}.items()}
        key = name.replace(".", "__")
        before = make_config(folder, run, **{**options, key: one})
        after = make_config(folder, run, **{**options, key: other})
        stopped = train_one(ctx, before, 1)
        read: list[str] = []

        def listen(path: Path, reads: Any, read: list[str] = read) -> None:
            read.append(path.name)
            read_shard(path, reads)

        with mock.patch("megalite.checkpoint.load.read_shard", listen):
            refused = accept_one(ctx, after, [])
            assert read == [], name
            done = accept_one(ctx, after, ["all-listed"])  # tokens change the steps, too
        found.append((one, other, stopped.code, refused, done, len(read)))
    return found


def accept_one(ctx: Any, config: RunConfig, names: list[str]) -> Any:
    parallel = config.parallel
    mesh = ctx.mesh(tp=parallel.tp, dp=parallel.dp, pp=parallel.pp)
    try:
        return Trainer(config, mesh, accept=accepted(names)).run(3)
    except MegaliteError as error:
        return str(error)


@pytest.mark.long
def test_each_accepted_change_resumes_or_is_refused_before_anything_is_read(
    pool: RankPool, tmp_path: Path
) -> None:
    refusals = []
    for number, (name, rest, *values) in enumerate(PAIRS):
        folder = tmp_path / str(number)
        write_tokens(folder / "data", 5 * GLOBAL_BATCH)
        found = pool.run(changed_both_ways, rest.get("parallel.dp", 1), folder, name, rest, *values)
        for one, other, stopped, refused, done, num_read in found[0]:
            assert stopped == 75, (name, one)
            assert f"\n{name} is " in refused, (name, one, other, refused)
            if done == 75:
                assert num_read > 0
                assert name in refused.partition("--accept ")[2].split(",")
            else:
                assert num_read == 0, (name, one, other, done)
                assert f"{name} is " in done
                assert " (cannot change within a run: " in done
                assert "--accept" not in refused
                refusals.append((name, one, other))
    others = ("float32", "bfloat16", "float16")
    assert set(map(repr, refusals)) == {
        *(repr(("train.dtype", "float64", other)) for other in others),
        *(repr(("train.dtype", other, "float64")) for other in others),
        repr(("optimizer.groups", [], ALL_ADAMW)),
        repr(("optimizer.groups", ALL_ADAMW, [])),
    }


def test_an_average_begins_at_the_weights_and_a_scale_at_its_start(
    pool: RankPool, folder: Path
) -> None:
    changes = {"train__dtype": "float16", "optimizer__ema_decay": 0.5, "train__steps": 3}
    before = checkpoint_tensors(folder / "run", 2)
    ((code, _),) = pool.run(resumed, 1, folder, "all-listed", {**changes, "optimizer__lr": 0.0})
    assert code == 0
    after = checkpoint_tensors(folder / "run", 3)
    for name, tensor in before.items():
        if name.startswith("param/"):
            assert torch.equal(after[name], tensor), name
            assert torch.equal(after[name.replace("param/", "ema/")], tensor), name
    assert lines(folder / "run", "step")[-1]["loss_scale"] == 65536.0


def agree(ctx: Any, folder: Path, odd_rank: int) -> str:
    """Runs in a rank: `odd_rank` accepts more than the others."""
    accept = accepted(["optimizer.lr,train.seed" if ctx.rank == odd_rank else "optimizer.lr"])
    try:
        require_same_config(make_config(folder, "run", "dp2"), ctx.mesh(dp=2), accept)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_must_accept_the_same(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(agree, 2, tmp_path, -1) == ["", ""]
    told = pool.run(agree, 2, tmp_path, 1)
    assert told == [told[0]] * 2
    assert told[0].startswith(
        "rank 1 has --accept='optimizer.lr,train.seed', rank 0 has 'optimizer.lr'\n"
    )


def test_the_table_has_a_place_for_every_setting() -> None:
    kinds = {name: may_change(name) for name in keys()}
    assert {name for name, kind in kinds.items() if kind == "never"} >= {
        "model.num_layers",
        "model.vocab_size",
        "data.seq_length",
    }
    listed = {name for name, kind in kinds.items() if kind == "accept"}
    assert listed >= {*HORIZON, "optimizer.lr", "train.global_batch", "train.seed", "train.z_loss"}
    kernels = ("kernels.backend", "kernels.attention", "kernels.norm", "optimizer.adam")
    assert {kinds[name] for name in kernels} == {"free"}  # told, as kernel_notice has it
    for layout in LAYOUTS.values():
        assert {kinds[name] for name in layout} <= {"free"}


def test_what_can_be_accepted_is_checked_before_anything_starts() -> None:
    assert accepted(["train.seed, data", "optimizer.lr"]) == {"train.seed", "data", "optimizer.lr"}
    assert accepted([]) == accepted([""]) == frozenset()
    with pytest.raises(ConfigError) as caught:
        accepted(["train.sead,model.num_layers"])
    assert caught.value.problems == [
        "--accept train.sead: no such setting; did you mean train.seed?",
        "--accept model.num_layers: cannot change within a run; start a run with another name",
    ]
