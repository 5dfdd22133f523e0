"""The learning rate against hand-computed values, and its edges."""

from __future__ import annotations

import math

import pytest

from megalite.checks.settings import check_config
from megalite.config import OptimizerConfig, RunConfig
from megalite.optim.lr_schedule import learning_rate
from megalite.run.batch_plan import batch_plan
from tests.checks.test_settings import config


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


@pytest.mark.parametrize("ramp", [{}, {"start": 8, "increment": 4, "samples": 50}])
@pytest.mark.parametrize("min_lr", [0.0, 1e-5])
@pytest.mark.parametrize("unit", ["steps", "tokens"])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_rate_of_zero_is_refused_wherever_there_is_one(
    schedule: str, unit: str, min_lr: float, ramp: dict[str, int]
) -> None:
    """By schedule, unit and batch ramp: the step that is named is the first without a rate."""
    for end in range(11, 26):
        settings: dict[str, object] = {
            "optimizer__lr_schedule": schedule,
            "optimizer__min_lr": min_lr,
            f"optimizer__decay_{unit}": end if unit == "steps" else end * 16 * 32 - 7,
            **{f"train__batch_ramp_{name}": value for name, value in ramp.items()},
            "train__steps": 20,
        }
        if schedule == "wsd":
            settings[f"optimizer__wsd_decay_{unit}"] = 5 if unit == "steps" else 600
        run = config(**settings)
        rates = rates_of(run)
        named = [line for line in check_config(run) if "the learning rate is 0" in line]
        assert bool(named) == (0.0 in rates), settings
        if named:
            assert f" 0 from step {rates.index(0.0) + 1} of 20 on" in named[0]


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_a_schedule_without_an_end_never_has_a_rate_of_zero(schedule: str) -> None:
    run = config(optimizer__lr_schedule=schedule, optimizer__warmup_steps=4)
    assert min(rates_of(run)) > 0
    assert check_config(run) == []


def rates_of(run: RunConfig) -> list[float]:
    """The rate of each step of a run."""
    plan, length = batch_plan(run), run.data.seq_length
    return [
        learning_rate(
            step, run.optimizer, run.train.steps, lambda step: plan.first_sample(step) * length
        )
        for step in range(run.train.steps)
    ]
