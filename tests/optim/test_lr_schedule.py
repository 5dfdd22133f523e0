"""The learning rate against hand-computed values, and its edges."""

from __future__ import annotations

import math
from collections.abc import Callable

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


def test_inverse_sqrt_meets_the_warmup_and_has_a_floor() -> None:
    settings = {"lr": 1.0, "warmup_steps": 4, "lr_schedule": "inverse_sqrt"}
    rates = series(16, **settings)
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == pytest.approx([math.sqrt(4 / n) for n in range(5, 19)])
    assert rates[15] == pytest.approx(0.5)
    assert min(series(100, min_lr=0.4, **settings)[4:]) == 0.4
    assert series(3, **settings) == rates[:5]  # it has no end


@pytest.mark.parametrize(
    ("shape", "end"),
    [
        ("linear", [1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [1.0, 0.55 + 0.45 * math.sqrt(0.5), 0.55, 0.55 - 0.45 * math.sqrt(0.5), 0.1]),
        ("1-sqrt", [1.0, 0.55, 1 - 0.9 * math.sqrt(0.5), 1 - 0.9 * math.sqrt(0.75), 0.1]),
    ],
)  # fmt: skip
def test_wsd_warms_up_stays_and_decays(shape: str, end: list[float]) -> None:
    settings = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 2, "lr_schedule": "wsd",
                "wsd_decay_steps": 4, "wsd_decay_shape": shape}  # fmt: skip
    rates = series(10, **settings)
    assert rates[:6] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates[6:11] == pytest.approx(end)
    assert rates[11] == 0.1
    # a longer run only has a longer plateau; an end of its own ends it early
    assert series(13, **settings)[5:] == rates[2:]
    assert series(13, decay_steps=10, **settings)[:12] == rates


def test_zero_rate() -> None:
    assert series(3, lr=0.0, warmup_steps=2) == [0.0] * 5


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_schedule": "linear", "warmup_steps": 3},
        {"lr_schedule": "cosine", "warmup_steps": 3, "decay_steps": 11},
        {"lr_schedule": "inverse_sqrt", "warmup_steps": 5},
        {"lr_schedule": "wsd", "warmup_steps": 3, "wsd_decay_steps": 6, "decay_steps": 15},
        {"lr_schedule": "wsd", "warmup_steps": 3, "wsd_decay_steps": 6},
    ],
)
def test_lengths_in_tokens_equal_lengths_in_steps_of_one_size(settings: dict[str, object]) -> None:
    size = 48
    wanted = rates_of(settings, lambda step: step * size)
    in_tokens = {
        key.replace("_steps", "_tokens"): value * size if isinstance(value, int) else value
        for key, value in settings.items()
    }
    assert rates_of(in_tokens, lambda step: step * size) == pytest.approx(wanted, rel=1e-12)
    # one length in tokens turns all others into tokens
    mixed = {key: value for key, value in settings.items() if key != "warmup_steps"}
    mixed["warmup_tokens"] = in_tokens["warmup_tokens"]
    assert rates_of(mixed, lambda step: step * size) == pytest.approx(wanted, rel=1e-12)


def rates_of(settings: dict[str, object], tokens_before: Callable[[int], int]) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, "min_lr": 0.1, **settings})
    return [learning_rate(step, config, 15, tokens_before) for step in range(18)]


def test_under_a_growing_batch_tokens_set_the_pace() -> None:
    def before(step: int) -> int:  # 10, 20, 30 ... tokens a step
        return 5 * step * (step + 1)

    settings = {"lr": 1.0, "lr_schedule": "linear", "warmup_tokens": 60, "decay_tokens": 210}
    config = OptimizerConfig.model_validate(settings)
    rates = [learning_rate(step, config, 6, before) for step in range(8)]
    # after the first steps 10, 30, 60 tokens; later ones begin at 60, 100, 150, 210
    wanted = [1 / 6, 1 / 2, 1.0, 1.0, 1 - 40 / 150, 1 - 90 / 150, 0.0, 0.0]
    assert rates == pytest.approx(wanted)
