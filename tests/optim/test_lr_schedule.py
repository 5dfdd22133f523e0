"""The learning rate against hand-computed values, and its edges."""

from __future__ import annotations

import math

import pytest

from megalite.config import OptimizerConfig
from megalite.optim.lr_schedule import learning_rate


def series(total_steps: int, **settings: object) -> list[float]:
    config = OptimizerConfig.model_validate(settings)
    return [learning_rate(step, config, total_steps) for step in range(total_steps + 2)]


def test_warmup_starts_above_zero_and_reaches_the_full_rate() -> None:
    rates = series(8, lr=1.0, warmup_steps=4, lr_schedule="constant")
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_linear_falls_to_the_minimum_at_the_horizon() -> None:
    rates = series(4, lr=1.0, min_lr=0.2, lr_schedule="linear")
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_after_warmup() -> None:
    rates = series(6, lr=2.0, min_lr=1.0, warmup_steps=2, lr_schedule="cosine")
    half = 1.0 + 0.5 * (1.0 + math.cos(math.pi / 4))
    assert rates[:4] == pytest.approx([1.0, 2.0, 2.0, half])
    assert rates[4] == pytest.approx(1.5)
    assert rates[6:] == pytest.approx([1.0, 1.0])


def test_decay_steps_replace_the_total() -> None:
    rates = series(8, lr=1.0, lr_schedule="linear", decay_steps=2)
    assert rates[:4] == pytest.approx([1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_stay_in_range_at_every_edge(schedule: str) -> None:
    for total in (0, 1, 2, 5):
        for warmup in (0, 1, 5, 9):
            rates = series(total, lr=1.0, min_lr=0.1, warmup_steps=warmup, lr_schedule=schedule)
            assert all(0.1 <= rate <= 1.0 for rate in rates)


def test_zero_rate() -> None:
    assert series(3, lr=0.0, warmup_steps=2) == [0.0] * 5
