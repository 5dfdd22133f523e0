"""Blends: every prefix within one of its exact share, the same however and whenever it is asked."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.shares import decimal_fraction
from megalite.data.blend import Blend
from megalite.errors import ConfigError
from tests.data.kit import PROPERTY

FEW = st.lists(st.floats(0, 1e6), min_size=1, max_size=4).filter(any)
DECIMALS = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)


def blend(*weights: float) -> Blend:
    return Blend([decimal_fraction(weight) for weight in weights])


def worst_error(made: Blend, length: int, start: int = 0) -> float:
    """The largest distance of any source from weight x n over n = start .. start + length."""
    source, numbers = made.at(start, length)
    counts = np.array(made.counts(start), dtype=object)
    worst = Fraction(0)
    for n, (which, number) in enumerate(zip(source.tolist(), numbers.tolist(), strict=True)):
        assert number == counts[which]
        counts[which] += 1
        worst = max(
            worst,
            *(abs(c - w * (start + n + 1)) for c, w in zip(counts, made.weights, strict=True)),
        )
    assert counts.tolist() == made.counts(start + length)
    return float(worst)


@PROPERTY
@given(weights=FEW, start=st.integers(0, 2**40))
def test_any_weights_of_up_to_four_sources_stay_within_one(
    weights: list[float], start: int
) -> None:
    made = blend(*weights)
    assert worst_error(made, 120) <= 1
    assert worst_error(made, 60, start) <= 1


@PROPERTY
@given(weights=DECIMALS, start=st.integers(0, 2**40))
def test_any_number_of_round_weights_stays_within_one(weights: list[int], start: int) -> None:
    made = blend(*(weight / 100 for weight in weights))
    assert worst_error(made, 150) < 1
    assert worst_error(made, 50, start) < 1


@PROPERTY
@given(weights=st.lists(st.floats(1e-9, 1), min_size=5, max_size=40))
def test_any_number_of_uneven_weights_stays_within_one(weights: list[float]) -> None:
    made = blend(*weights)
    assert worst_error(made, 40) <= 1
    assert worst_error(made, 40, 10**12) <= 1


@PROPERTY
@given(
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(any),
    first=st.integers(0, 10**15),
    counts=st.lists(st.integers(0, 200), max_size=5),
)
def test_a_blend_does_not_depend_on_how_it_is_asked_for(
    weights: list[float], first: int, counts: list[int]
) -> None:
    whole = blend(*weights).at(first, sum(counts))
    made, at, parts = blend(*weights), first, []
    for count in counts:
        parts.append(made.at(at, count))
        at += count
    for name in ("source", "number"):
        joined = [value for part in parts for value in getattr(part, name).tolist()]
        assert joined == getattr(whole, name).tolist()


def test_weights_of_a_thousandth_and_the_rest() -> None:
    made = blend(0.001, 0.999)
    source, numbers = made.at(0, 10_000)
    assert np.bincount(source).tolist() == [10, 9990]
    assert numbers[source == 0].tolist() == list(range(10))
    assert worst_error(made, 10_000) < 1


def test_weights_that_are_zero_or_tiny() -> None:
    assert made_of(blend(0, 3, 0, 1), 8) == [0, 6, 0, 2]
    assert made_of(blend(1e-12, 1), 1000) == [0, 1000]
    assert blend(1e-12, 1).counts(10**13)[0] in (9, 10)
    assert made_of(blend(2.5), 7) == [7]
    assert blend(0.1, 0.2, 0.7).counts(10) == [1, 2, 7]


def made_of(made: Blend, length: int) -> list[int]:
    return np.bincount(made.at(0, length).source, minlength=len(made.weights)).tolist()


def test_a_thousand_sources() -> None:
    made = blend(*(1 + n % 7 for n in range(1000)))
    assert worst_error(made, 50, 10**9) < 1


@pytest.mark.parametrize("weights", [(), (0, 0), (1, -1)])
def test_weights_without_a_share_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="need 0 or more, and one above 0"):
        blend(*weights)


GOLDEN = {
    (0.7, 0.2, 0.1): "c53723c096cea81af66df9f10c7e9ff74486c60fed442097b4b03ac9a41d0c40",
    (1.0, 0.6180339887498949): "58301b5818626825ce5802420f81b0edf93e5a6af852e4cc3aa78a28941ad55c",
    (
        0.5,
        0.31415926,
        0.27182818,
        0.1,
        0.01,
        0.00123456789,
    ): "d0866e36fb1574aa4b362ad755f792c176ea30fc66ad1e6c30a48a56240b930c",
    (
        0.39,
        0.68,
        0.112444,
        0.138691,
        0.012278,
        0.112399,
        0.2718281828,
        1e-7,
    ): "e67e0956180c96a0627fda9f96952339908d959930fbc6379b63afa73a3891ea",
}


@pytest.mark.parametrize("weights", GOLDEN)
def test_golden_blend(weights: tuple[float, ...]) -> None:
    """A change here changes the data order of every run that is resumed."""
    parts = [part for first in (0, 10**9) for part in blend(*weights).at(first, 300)]
    content = b"".join(part.astype("<i8").tobytes() for part in parts)
    assert hashlib.sha256(content).hexdigest() == GOLDEN[weights]
