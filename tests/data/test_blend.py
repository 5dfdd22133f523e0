"""Blends: every prefix within one of its share, the same however and whenever it is asked."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.shares import MAX_PARTS, blend_parts, decimal_fraction
from megalite.data.blend import Blend
from tests.data.kit import PROPERTY

ANY = st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(any)
DECIMALS = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)
FAR = 10**15


def blend(*weights: float) -> Blend:
    return Blend([decimal_fraction(weight) for weight in weights])


def assert_within_one(parts: list[int], made: Blend, start: int, length: int) -> None:
    """Every prefix that ends in the stretch holds each source within less than one."""
    whole, counts = sum(parts), made.counts(start)
    source, numbers = made.at(start, length)
    for n, (which, number) in enumerate(zip(source.tolist(), numbers.tolist(), strict=True)):
        assert number == counts[which]
        counts[which] += 1
        for count, part in zip(counts, parts, strict=True):
            assert abs(count * whole - part * (start + n + 1)) < whole
    assert counts == made.counts(start + length)


@PROPERTY
@given(weights=ANY, start=st.integers(0, FAR))
def test_any_weights_stay_within_one_of_their_rounded_shares_anywhere(
    weights: list[float], start: int
) -> None:
    parts, made = blend_parts([decimal_fraction(w) for w in weights]), blend(*weights)
    assert_within_one(parts, made, 0, 60)
    assert_within_one(parts, made, start, 60)
    edge = start - start % sum(parts)  # of a period
    assert_within_one(parts, made, max(0, edge - 20), 40)


@PROPERTY
@given(weights=DECIMALS, start=st.integers(0, 2**40))
def test_round_weights_stay_within_one_of_their_exact_shares(
    weights: list[int], start: int
) -> None:
    made = blend(*(weight / 100 for weight in weights))
    assert_within_one(weights, made, 0, 150)
    assert_within_one(weights, made, start, 50)


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
    assert_within_one([1, 999], made, 0, 10_000)


def test_weights_that_are_zero_or_alone() -> None:
    assert np.bincount(blend(0, 3, 0, 1).at(0, 8).source).tolist() == [0, 6, 0, 2]
    assert blend(2.5).at(7, 3).number.tolist() == [7, 8, 9]
    assert blend(0.1, 0.2, 0.7).counts(10) == [1, 2, 7]


def test_ten_thousand_uneven_sources_far_along_take_about_a_second() -> None:
    draw = random.Random(5)
    weights = [decimal_fraction(draw.uniform(1, 9)) for _ in range(10_000)]
    began = time.process_time()
    made = Blend(weights)
    source, number = made.at(FAR, 512)
    assert time.process_time() - began < 5
    assert made.counts(FAR)[int(source[0])] == number[0]
    parts = blend_parts(weights)
    assert all(
        abs(count * MAX_PARTS - part * FAR) < MAX_PARTS
        for count, part in zip(made.counts(FAR), parts, strict=True)
    )


def digest(weights: Sequence[Fraction | int], starts: Sequence[int], count: int) -> str:
    made = Blend(weights)
    parts = [part for first in starts for part in made.at(first, count)]
    parts.append(np.array(made.counts(10**12 + 7)))
    content = b"".join(part.astype("<i8").tobytes() for part in parts)
    return hashlib.sha256(content).hexdigest()[:16]


# Whoever changes these changes the data order of every run that is resumed.
ROUNDED = {
    (1.0, 0.6180339887498949): "7602f2d6c267a99b",
    (0.5, 0.31415926, 0.27182818, 0.1, 0.01, 0.00123456789): "35271541c002e939",
}


@pytest.mark.parametrize("weights", ROUNDED)
def test_golden_order_of_rounded_weights(weights: tuple[float, ...]) -> None:
    fractions = [decimal_fraction(weight) for weight in weights]
    assert digest(fractions, (0, 10**9), 300) == ROUNDED[weights]


def seeded_weights(seed: int) -> list[int]:
    """Weights of 1 to 400 sources, some of them 0, of 65,536 parts at most."""
    draw = random.Random(seed)
    count = draw.choice((1, 2, 3, 5, 12, 60, 400))
    largest = MAX_PARTS // count
    return [draw.randint(0 if n else 1, draw.choice((3, 50, largest))) for n in range(count)]


# As the version computed that walked from state to state, and knew no rounding.
EXACT = [
    "232f6da641312754",
    "3338a6200d4fc229",
    "2e22b0a92fa4ec9b",
    "2faddc63d6f7f6f7",
    "47a107efcc5e6696",
    "cb3d28fa7e392af2",
    "f88aa5b5febe4fa4",
    "2aa0ebfb01f6fb2f",
    "5ce4e3ee3642613b",
    "338e22a0786c8bc4",
    "7c9bd4e524887743",
    "48d6de37910a8a41",
    "78bfe194b2814f52",
    "4306084a56c58dea",
    "dcc41a9e4373a4d3",
    "0fc3299c65951745",
    "dd0480456210113c",
    "6a1e1e5048467580",
    "209ebb771bdbe650",
    "1cbeaa9a37f7c573",
    "9c13562e9df8b4b7",
    "59c8b5400fe23772",
    "5222460fd5b816b0",
    "4dcc205a04842413",
]


@pytest.mark.parametrize("seed", range(len(EXACT)))
def test_the_order_of_exact_weights_is_that_of_earlier_versions(seed: int) -> None:
    assert digest(seeded_weights(seed), (0, 65_000, FAR), 1500) == EXACT[seed]
