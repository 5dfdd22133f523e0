"""What a resume restores beside tensors, field by field: position, policies, counts of updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.config import RunConfig
from megalite.train.loop import Trainer
from megalite.train.policies import NON_FINITE, SPIKE
from tests.pool import RankPool
from tests.train.kit.runs import make_config, make_trainer, write_tokens

# Every field that training changes, by its owner, with a value that no new run has.
LOSSES = [4.5, 4.25, 4.0, 4.125, 4.5, 4.25, 4.0]
VALUES: dict[str, dict[str, Any]] = {
    "Position": {"step": 3, "saved_step": 3, "skips": {SPIKE: 2, NON_FINITE: 5}},
    "SpikeGuard": {"losses": LOSSES, "in_a_row": 1},
    "DistributedOptimizer": {"_num_updates": 7},
    "SkipPolicy": {"num_skips": 2},
    "LossScaler": {"scale": 64.0, "_good_steps": 4, "_hysteresis": 1},
}


def owners(trainer: Trainer) -> list[Any]:
    at, optimizer = trainer.at, trainer.engine.optimizer
    return [at, at.guard, optimizer, optimizer._skips, optimizer._scaler]


def fields(trainer: Trainer) -> Iterator[tuple[str, str, Any]]:
    """Owner, name and value of every field that is a number, a text or a collection of these."""
    for owner in owners(trainer):
        for name, value in vars(owner).items():
            if isinstance(value, (deque, dict)):
                value = list(value) if isinstance(value, deque) else dict(value)
            elif not isinstance(value, (int, float, str, type(None))):
                continue
            yield type(owner).__name__, name, value


def save_and_resume(ctx: Any, config: RunConfig) -> list[list[tuple[str, str, Any]]]:
    """The fields of a new run, of one saved with `VALUES`, and of the run resumed from it."""
    trainer = make_trainer(ctx, config)
    new = list(fields(trainer))
    for owner in owners(trainer):
        for name, value in VALUES[type(owner).__name__].items():
            held = getattr(owner, name)
            if isinstance(held, deque):
                held.extend(value)
            elif isinstance(held, dict):
                held.update(value)
            else:
                setattr(owner, name, value)
    trainer._save()
    again = make_trainer(ctx, config)
    again._resume()
    return [new, list(fields(trainer)), list(fields(again))]


@pytest.mark.long
def test_every_field_comes_back(pool: RankPool, tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", 24)
    options = {"train__loss_spike": "skip", "optimizer__non_finite": "skip"}
    config = make_config(tmp_path, "fields", train__dtype="float16", **options)
    ((new, saved, resumed),) = pool.run(save_and_resume, 1, config)
    wanted = [(owner, name) for owner, values in VALUES.items() for name in values]
    changed = [(owner, name) for owner, name, value in saved if (owner, name, value) not in new]
    assert sorted(changed) == sorted(wanted)
    assert resumed == saved
