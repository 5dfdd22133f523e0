"""Shares of a blend as whole parts: exact where few are needed, otherwise rounded."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from megalite.config.shares import MAX_PARTS, apportion, blend_parts, decimal_fraction
from tests.data.kit import PROPERTY

WEIGHTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(any)


@PROPERTY
@given(weights=WEIGHTS, whole=st.integers(0, 10**15))
def test_apportioned_counts_add_up_and_lie_within_one_of_their_shares(
    weights: list[float], whole: int
) -> None:
    shares = [decimal_fraction(weight) for weight in weights]
    counts = apportion(shares, whole)
    assert sum(counts) == whole
    for share, count in zip(shares, counts, strict=True):
        assert abs(count - whole * share / sum(shares)) < 1
        assert share or not count


@PROPERTY
@given(weights=WEIGHTS)
def test_rounding_moves_a_share_by_less_than_a_part_of_the_whole(weights: list[float]) -> None:
    shares = [decimal_fraction(weight) for weight in weights]
    parts = blend_parts(shares)
    assert sum(parts) <= MAX_PARTS
    for share, part in zip(shares, parts, strict=True):
        moved = abs(Fraction(part, sum(parts)) - share / sum(shares))
        assert moved < Fraction(1, MAX_PARTS)


def test_weights_of_few_parts_are_exact_and_relative() -> None:
    tenths = [decimal_fraction(weight) for weight in (0.7, 0.2, 0.1)]
    assert blend_parts(tenths) == blend_parts([14, 4, 2]) == [7, 2, 1]
    assert blend_parts([MAX_PARTS - 1, 1]) == [MAX_PARTS - 1, 1]
    assert blend_parts([Fraction(5, 2)]) == [1]


def test_of_equal_remainders_the_first_gets_what_is_left() -> None:
    assert apportion([1, 1, 1], 4) == [2, 1, 1]
    assert apportion([0, 1, 1, 1], 2) == [0, 1, 1, 0]
    third = Fraction(1, 3) + Fraction(1, 10**9)
    assert blend_parts([third, 1 - third]) == [21845, 43691]
