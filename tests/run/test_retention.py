"""Which checkpoints stay: newest, one of each so many steps, and the best."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megalite.config import CheckpointConfig
from megalite.run.retention import kept_steps, most_kept

STEPS = [5, 10, 15, 20, 25, 30, 35]


@pytest.mark.parametrize(
    ("settings", "losses", "kept"),
    [
        ({}, {}, {25, 30, 35}),
        ({"keep": 1}, {}, {35}),
        ({"keep": 100}, {}, set(STEPS)),
        ({"keep": 1, "keep_every": 10}, {}, {10, 20, 30, 35}),
        ({"keep": 1, "keep_every": 12}, {}, {15, 25, 35}),  # the first at 12, 24 or later
        ({"keep": 1, "keep_every": 40}, {}, {35}),
        ({"keep": 1, "keep_best": "v"}, {10: 2.0, 20: 1.0, 30: 1.0}, {20, 35}),
        ({"keep": 1, "keep_best": "v"}, {10: 2.0, 12: 0.5, 20: math.nan}, {10, 35}),
        ({"keep": 1, "keep_best": "v"}, {}, {35}),
        ({"keep": 1}, {10: 1.0}, {35}),
        ({"keep": 2, "keep_every": 20, "keep_best": "v"}, {5: 1.0}, {5, 20, 30, 35}),
    ],
)
def test_what_stays_is_the_union(
    settings: dict[str, Any], losses: dict[int, float], kept: set[int]
) -> None:
    assert kept_steps(CheckpointConfig(**settings), STEPS[::-1], losses) == kept


@pytest.mark.parametrize("keep_every", [0, 1, 7, 10, 12, 40])
def test_never_more_stay_than_counted_and_none_comes_back(keep_every: int) -> None:
    settings = CheckpointConfig(keep=2, keep_every=keep_every, keep_best="v")
    losses = {step: abs(step - 50.0) for step in range(0, 100, 5)}
    there: set[int] = set()
    for step in range(5, 100, 5):
        there.add(step)
        there = kept_steps(settings, there, losses)
        assert len(there) <= most_kept(settings, step)
        assert {step, min(step, 50)} <= there
    firsts = {-(-n // 5) * 5 for n in range(keep_every, 96, keep_every)} if keep_every else set()
    assert there == firsts | {50, 90, 95}
