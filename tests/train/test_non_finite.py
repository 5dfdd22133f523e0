"""A NaN in one gradient element on one rank: skipped or stopped at, by all ranks alike (J01)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megalite.config import RunConfig
from tests.pool import RankPool
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    checkpoint_tensors,
    different,
    lines,
    make_config,
    make_trainer,
    step_numbers,
    train,
    train_one,
    write_tokens,
)

POISONED, RANK = 3, 5  # the step, counted from 1, and the rank
TRAINED = {
    "train__steps": 4,
    "train__dtype": "bfloat16",
    "optimizer__overlap_grad_reduce": False,
    "checkpoint__interval": 1,
}


def poisoned(ctx: Any, config: RunConfig) -> tuple[Any, str]:
    """A run with a NaN put into RANK's own gradients before they are reduced; outcome, error."""
    trainer = make_trainer(ctx, config)
    optimizer = trainer.engine.optimizer
    reducer, buffers = optimizer._reducers[0], optimizer._buffers[0]
    wait = reducer.wait

    def wait_after_poison() -> None:
        if ctx.rank == RANK and trainer.step == POISONED - 1:
            buffers.grads[7] = math.nan
        wait()

    reducer.wait = wait_after_poison
    try:
        return trainer.run(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """Data, and a run "sound" without any NaN."""
    path = tmp_path_factory.mktemp("non-finite")
    write_tokens(path / "data", 3 * GLOBAL_BATCH)
    pool.run(train, 8, [(make_config(path, "sound", "3d", **TRAINED), None)])
    return path


def state(folder: Path, step: int) -> dict[str, Any]:
    manifest = folder / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    found: dict[str, Any] = json.loads(manifest.read_text())["manifest"]["state"]
    return found


@pytest.mark.long
def test_skip_leaves_the_weights_and_moves_the_data(pool: RankPool, folder: Path) -> None:
    config = make_config(folder, "skips", "3d", optimizer__non_finite="skip", **TRAINED)
    assert pool.run(poisoned, 8, config) == [(0, "")] * 8
    run, sound = folder / "skips", folder / "sound"
    before, after, end = (checkpoint_tensors(run, step) for step in (2, 3, 4))
    assert different(before, after) == []
    assert len(different(after, end)) == len(end)

    skips = [(line["step"], line["reason"]) for line in lines(run, "skip")]
    assert skips == [(POISONED, "non-finite gradients")]
    steps, wanted = step_numbers(run), step_numbers(sound)
    assert steps[:2] == wanted[:2]
    keys = ("step", "lr", "consumed_tokens")
    assert [[line[k] for k in keys] for line in lines(run, "step")] == [
        [line[k] for k in keys] for line in lines(sound, "step")
    ]
    assert lines(run, "step")[POISONED - 1]["grad_norm"] == "nan"
    # the batch of step 3 went in before its gradients were spoilt
    assert lines(run, "step")[POISONED - 1]["loss"] == lines(sound, "step")[POISONED - 1]["loss"]
    assert [state(run, step)["optimizer"] for step in (2, 3, 4)] == [
        {"num_updates": 2, "num_skips": 0},
        {"num_updates": 2, "num_skips": 1},
        {"num_updates": 3, "num_skips": 0},
    ]
    assert state(run, 3)["trainer"]["consumed_tokens"] == wanted[2][4]


@pytest.mark.long
def test_stop_ends_every_rank_with_the_step_in_the_error(pool: RankPool, folder: Path) -> None:
    config = make_config(folder, "stops", "3d", **TRAINED)
    for code, error in pool.run(poisoned, 8, config):
        assert code is None
        assert error.startswith(f"NonFiniteGradientError: step {POISONED}: gradients of update 3 ")
    run = folder / "stops"
    (end,) = lines(run, "end")
    assert (end["step"], end["exit_code"]) == (POISONED - 1, 2)
    assert f"step {POISONED}: gradients" in end["reason"]
    assert [line["step"] for line in lines(run, "step")] == [1, 2]
    assert (
        f"failed at step 2: NonFiniteGradientError: step {POISONED}"
        in (run / "log.txt").read_text()
    )
    # what the run left is good: it goes on from the last checkpoint as if nothing had happened
    for outcome in pool.run(train_one, 8, config):
        assert (outcome.code, outcome.first_step) == (0, POISONED - 1)
    assert step_numbers(run) == step_numbers(folder / "sound")


def test_skipping_without_end_stops(pool: RankPool, folder: Path) -> None:
    config = make_config(
        folder, "gives-up", optimizer__non_finite="skip", optimizer__max_skips=2, train__steps=9
    )
    ((code, error),) = pool.run(always_poisoned, 1, config)
    assert code is None
    assert error.startswith("NonFiniteGradientError: step 3: ")
    assert "after 2 skipped steps in a row" in error
    assert [line["step"] for line in lines(folder / "gives-up", "skip")] == [1, 2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_too_large_for_the_moments_stops_or_is_skipped(
    pool: RankPool, folder: Path, dtype: str
) -> None:
    """It is finite, and so is its norm in float64, but not the square that AdamW keeps."""
    config = make_config(folder, f"large-{dtype}", optimizer__clip_grad=None, train__dtype=dtype)
    ((code, error),) = pool.run(always_poisoned, 1, config, 1e25)
    assert code is None
    assert error.startswith(
        "NonFiniteGradientError: step 1: gradients of update 1 are too large: their norm of 1e+25 "
        "has no square in float32; weights and optimizer state are as before this "
        "update. Lower optimizer.lr, check the data, set optimizer.clip_grad, or "
    )
    skipping: dict[str, Any] = {"optimizer__non_finite": "skip", "optimizer__max_skips": 9}
    config = make_config(
        folder, f"skips-{dtype}", optimizer__clip_grad=None, train__dtype=dtype, **skipping
    )
    assert pool.run(always_poisoned, 1, config, 1e25) == [(0, "")]
    (first, *_) = skips = lines(folder / f"skips-{dtype}", "skip")
    assert len(skips) == 6
    assert first["reason"] == "non-finite gradients"


def always_poisoned(ctx: Any, config: RunConfig, value: float = math.inf) -> tuple[Any, str]:
    trainer = make_trainer(ctx, config)
    optimizer = trainer.engine.optimizer
    wait = optimizer._reducers[0].wait

    def wait_after_poison() -> None:
        wait()
        optimizer._buffers[0].grads[7] = value

    optimizer._reducers[0].wait = wait_after_poison
    try:
        return trainer.run(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
