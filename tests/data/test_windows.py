"""Halving: any weights, any place, every prefix within one; states against all that there are."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import product
from math import ceil, floor
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megalite.config.shares import decimal_fraction
from megalite.data import windows
from megalite.data.blend import Blend, _best_tree, _Tree
from megalite.data.windows import Halving, Interval, Shares, earliest_deadlines, state_within
from tests.data.kit import PROPERTY

LARGE = st.integers(1, 2**64)
UNEVEN = st.builds(lambda n, scale: Fraction(n, 10**scale), LARGE, st.integers(0, 24))
NEAR = st.builds(lambda n: 1 + Fraction(n, 10**12), st.integers(0, 1000))
SMALL = st.builds(lambda n, denominator: Fraction(n, denominator), st.integers(1, 999), LARGE)
WEIGHTS = st.one_of(
    st.lists(UNEVEN, min_size=5, max_size=40),
    st.lists(NEAR, min_size=5, max_size=40),
    st.lists(SMALL, min_size=5, max_size=12),
    st.lists(NEAR, min_size=5, max_size=12).map(lambda w: [*w, Fraction(10**9)]),
    st.lists(UNEVEN, min_size=5, max_size=9).map(lambda w: [Fraction(0), sum(w) * 10**14, *w]),
).map(lambda weights: [weight / sum(weights) for weight in weights])


def assert_within_one(made: Any, weights: list[Fraction], start: int, length: int) -> None:
    """Every prefix that ends in the stretch holds each source within less than one."""
    shares = Shares.of(weights)
    counts = made.counts(start)
    source, number = made.at(start, length)
    for n, (which, its) in enumerate(zip(source.tolist(), number.tolist(), strict=True), start):
        assert its == counts[which]
        counts[which] += 1
        for count, part in zip(counts, shares.parts, strict=True):
            assert abs(count * shares.whole - part * (n + 1)) < shares.whole
    assert counts == made.counts(start + length)


@PROPERTY
@given(weights=WEIGHTS, start=st.integers(0, 10**15), leaf=st.sampled_from([None, 1, 8]))
def test_any_weights_of_any_number_of_sources_stay_within_one_anywhere(
    weights: list[Fraction], start: int, leaf: int | None
) -> None:
    made = Halving(weights, leaf)
    assert_within_one(made, weights, 0, 50)
    edge = start - start % 2**13  # a multiple of the default's leaf
    assert_within_one(made, weights, max(0, edge - 20), 40)
    assert_within_one(made, weights, start, 20)


@PROPERTY
@given(
    parts=st.lists(st.integers(1, 60), min_size=2, max_size=9),
    many=st.integers(0, 400),
    leaf=st.sampled_from([1, 2, 4, 16]),
)
def test_whole_periods_of_small_weights_stay_within_one(
    parts: list[int], many: int, leaf: int
) -> None:
    whole = sum(parts) + many
    weights = [Fraction(part, whole) for part in [*parts, many]]
    made = Halving(weights, leaf)
    assert_within_one(made, weights, 0, whole + 1)
    assert made.counts(whole) == [*parts, many]


def begun(weights: list[Fraction], n: int) -> Iterator[tuple[int, Fraction, Fraction, Fraction]]:
    """Of each source with a begun job: which, how much of it is due, its release, its deadline."""
    for source, weight in enumerate(weights):
        number = floor(weight * n)
        if weight * n > number:
            yield source, weight * n - number, number / weight, (number + 1) / weight


def reaches(weights: list[Fraction], n: int, counts: list[int], times: range) -> bool:
    """The condition of the docstring, for times on one side of n."""
    jobs = [
        (fraction, release, deadline, counts[source] - floor(weights[source] * n))
        for source, fraction, release, deadline in begun(weights, n)
    ]
    for time in times:
        late = [(fraction, done) for fraction, _, deadline, done in jobs if deadline > time]
        early = [(fraction, done) for fraction, release, _, done in jobs if release < time]
        if time > n and sum(done for _, done in late) > ceil(sum(f for f, _ in late)):
            return False
        if time < n and sum(done for _, done in early) < floor(sum(f for f, _ in early)):
            return False
    return True


def states(weights: list[Fraction], n: int, times: range) -> list[list[int]]:
    """All counts of n samples by floors and ceilings that fulfil the condition."""
    choices = [sorted({floor(weight * n), ceil(weight * n)}) for weight in weights]
    every = (list(counts) for counts in product(*choices) if sum(counts) == n)
    return [counts for counts in every if reaches(weights, n, counts, times)]


@PROPERTY
@given(
    parts=st.lists(st.integers(1, 50), min_size=2, max_size=5),
    many=st.integers(1, 100),
    cuts=st.lists(st.integers(0, 90), min_size=3, max_size=3, unique=True).map(sorted),
)
@example(parts=[1] * 5, many=1, cuts=[0, 2, 3])  # all released at one place
def test_between_any_two_states_is_one_that_leads_from_one_to_the_other(
    parts: list[int], many: int, cuts: list[int]
) -> None:
    whole = sum(parts) + many
    weights = [Fraction(part, whole) for part in [*parts, many]]
    shares = Shares.of(weights)
    first, middle, last = cuts
    befores = states(weights, first, range(first + 1, last))
    afters = states(weights, last, range(first + 1, last))
    for before, after in product(befores[::3] or befores, afters[::3] or afters):
        if all(a <= b for a, b in zip(before, after, strict=True)):
            found = state_within(shares, Interval(first, last, before, after), middle)
            assert sum(found) == middle
            assert all(
                max(low, floor(w * middle)) <= count <= min(high, ceil(w * middle))
                for low, count, high, w in zip(before, found, after, weights, strict=True)
            )
            assert reaches(weights, middle, found, range(first + 1, last))
            earliest_deadlines(shares, Interval(first, middle, before, found))
            earliest_deadlines(shares, Interval(middle, last, found, after))


def test_a_seek_finds_few_states_and_its_neighbours_none(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(shares: Shares, interval: Interval, middle: int) -> list[int]:
        calls.append(middle)
        return state_within(shares, interval, middle)

    monkeypatch.setattr(windows, "state_within", counted)
    raw = [Fraction(1, 3**n) for n in range(60)]
    made = Halving([weight / sum(raw) for weight in raw])
    made.at(10**15, 300)
    assert len(calls) <= 63
    seek = len(calls)
    made.at(10**15 + 10, 5)
    made.counts(10**15 + 200)
    assert len(calls) == seek
    made.at(10**15, 5000)  # ten intervals further, twice a state for each
    assert len(calls) <= seek + 20


def test_five_and_more_uneven_weights_leave_one_by_a_tree_but_not_in_a_blend() -> None:
    raw = [0.012278, 0.112399, 0.392837, 0.683864, 0.138691, 0.112444]
    made = Blend([decimal_fraction(weight) for weight in raw])
    before = _Tree(made.weights, _best_tree(made.weights, limit=2))
    with pytest.raises(AssertionError):
        assert_within_one(before, made.weights, 0, 3000)
    assert_within_one(made, made.weights, 0, 3000)


def test_threads_may_share_one_order() -> None:
    weights = [Fraction(1, 11 + n % 5) for n in range(9)]
    weights = [weight / sum(weights) for weight in weights]
    made, places = Halving(weights, 16), [37 * n % 9000 for n in range(300)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda place: made.at(place, 30).source.tolist(), places))
    whole = Halving(weights, 16).at(0, 9030).source.tolist()
    assert found == [whole[place : place + 30] for place in places]
