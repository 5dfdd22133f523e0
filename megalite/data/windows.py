"""Orders of sources in which every prefix holds each source within one of its exact share.

Sample j of a source of weight w, its job, may stand no earlier than floor(j / w) and no later than
ceil((j + 1) / w) - 1: that is the same as |count - w n| < 1 at every n (proportionate progress:
Baruah, Cohen, Plaxton and Varvel 1996). Earliest deadline first meets all windows, but only by
walking from the start. `Halving` reaches any place at once for any weights, by states: counts of
all sources at chosen places n, each floor(w n) or, where that source's begun job is done, one more.

* Let f be the fractions w n - floor(w n) of the begun jobs. A state is chosen such that of the jobs
  released before any time, at least floor(sum of their f) are done, and of those due after any
  time, at most ceil(sum of their f). The first lets the places before n be filled, whatever the
  state there; the second those behind: it is Hall's condition for jobs of one place each.
* At multiples of 1 / (smallest weight) or more, no job spans two of these, and f itself is a
  fractional choice; two chains of sets are totally unimodular, so there is a whole one (two-way
  rounding: Knuth 1995).
* Between two states at a and b the state at m also keeps what they say: a job done at a is done, a
  job not done at b is not. With conditions only for times within a .. b a choice again exists. By
  Hoffman's circulation theorem these cuts suffice, where R are jobs released before s >= a, L those
  due after t <= b, F1 and F0 the jobs kept done and not done (so F1 lies in all R, F0 in all L):
  floor f(R) <= ceil f(L) + |R - L|; |F1 in L| <= ceil f(L), as the state at a promised, and f only
  grows; |F0 in R| <= ceil sum (1 - f) over R, as that at b promised; and these two for all jobs.
* The choice with the earliest deadlines of all that meet the first condition is greedy (the bases
  of a matroid), and the smallest deadline by deadline; so it meets the second when any does.

So halving goes on down to a few hundred places, which earliest deadline first fills from one state
to the next. All numbers are Python's integers and exact. Knows no data, no torch and no files.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

END = 1 << 63  # no position is as far
LEAF = 512
KEPT = 4  # filled spans: as many as a few readers of neighbouring steps use


class Places(NamedTuple):
    """Samples in order: the source of each, and which sample of that source it is (from 0)."""

    source: NDArray[np.int64]
    number: NDArray[np.int64]


class Shares(NamedTuple):
    """Weights by source with one denominator; they add up to 1."""

    parts: tuple[int, ...]
    whole: int

    @classmethod
    def of(cls, weights: Sequence[Fraction]) -> Shares:
        whole = lcm(*(weight.denominator for weight in weights))
        return cls(tuple(int(weight * whole) for weight in weights), whole)

    def release(self, source: int, number: int) -> int:
        """First place that a job may have."""
        return number * self.whole // self.parts[source]

    def deadline(self, source: int, number: int) -> int:
        """First place that a job may no longer have."""
        return -(-(number + 1) * self.whole // self.parts[source])


class Span(NamedTuple):
    """Places first .. last - 1 with the counts of all sources before them and after them."""

    first: int
    last: int
    before: Sequence[int]
    after: Sequence[int]


def earliest_deadlines(shares: Shares, span: Span) -> Places:
    """The span's places filled: the released job with the earliest deadline, ties by source."""
    first, last, before, after = span
    waiting = [  # release first
        (shares.release(source, number), source, number)
        for source, number in enumerate(before)
        if number < after[source]
    ]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []  # deadline first
    sources, numbers = [], []
    for place in range(first, last):
        while waiting and waiting[0][0] <= place:
            _, source, number = heapq.heappop(waiting)
            deadline = min(last, shares.deadline(source, number))
            heapq.heappush(ready, (deadline, source, number))
        deadline, source, number = heapq.heappop(ready)
        assert place < deadline, "windows between two states can always be met"
        sources.append(source)
        numbers.append(number)
        if number + 1 < after[source]:
            heapq.heappush(waiting, (shares.release(source, number + 1), source, number + 1))
    return Places(np.array(sources, dtype=np.int64), np.array(numbers, dtype=np.int64))


def state_within(shares: Shares, span: Span, middle: int) -> list[int]:
    """Counts at a place within the span that can be reached from its start and reach its end."""
    counts, begun = [], []
    for source, part in enumerate(shares.parts):
        number, done = divmod(part * middle, shares.whole)
        counts.append(number)
        if done:
            begun.append((shares.release(source, number), source, done))
    free: list[tuple[int, int]] = []  # earliest deadline first
    taken = fractions = 0
    time = span.first - 1
    for release, source, done in sorted(begun):
        if release > time:  # all those released before are known
            taken += _take(free, fractions // shares.whole - taken, counts)
            time = release
        fractions += done
        if span.before[source] > counts[source]:
            counts[source] += 1
            taken += 1
        elif span.after[source] > counts[source]:
            heapq.heappush(free, (shares.deadline(source, counts[source]), source))
    _take(free, fractions // shares.whole - taken, counts)
    return counts


def _take(free: list[tuple[int, int]], need: int, counts: list[int]) -> int:
    """Do the `need` free jobs of the earliest deadlines; returns how many they are."""
    for _ in range(need):
        _, source = heapq.heappop(free)
        counts[source] += 1
    return max(0, need)


class _Filled(NamedTuple):
    span: Span
    places: Places


class Halving:
    """The order for any weights that add up to 1, by states at the middles of spans."""

    def __init__(self, weights: Sequence[Fraction], leaf: int | None = None) -> None:
        """`leaf`: places that are filled at once, a power of two; by itself by the sources."""
        self._shares = Shares.of(weights)
        self._leaf = leaf or max(LEAF, _power_of_two(8 * len(weights)))
        smallest = min(part for part in self._shares.parts if part)
        longest = -(-self._shares.whole // smallest)
        self._top = min(END, max(self._leaf, _power_of_two(longest)))
        # What was found last, to go on from: replaced as a whole, so threads may share them.
        self._path: tuple[Span, ...] = ()
        self._filled: tuple[_Filled, ...] = ()

    def at(self, first: int, count: int) -> Places:
        stop = first + count
        source, number = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        place = first
        while place < stop:
            span, places = self._fill(place)
            end = min(stop, span.last)
            to, of = slice(place - first, end - first), slice(place - span.first, end - span.first)
            source[to], number[to] = places.source[of], places.number[of]
            place = end
        return Places(source, number)

    def counts(self, n: int) -> list[int]:
        span, places = self._fill(n)
        begun = np.bincount(places.source[: n - span.first], minlength=len(span.before))
        return [before + more for before, more in zip(span.before, begun.tolist(), strict=True)]

    def _fill(self, place: int) -> _Filled:
        """The filled leaf that holds a place."""
        filled = self._filled
        for known in filled:
            if known.span.first <= place < known.span.last:
                return known
        span = self._descend(place)
        new = _Filled(span, earliest_deadlines(self._shares, span))
        self._filled = (new, *filled[: KEPT - 1])
        return new

    def _descend(self, place: int) -> Span:
        """The leaf that holds a place, from the last path's smallest span that does."""
        assert place < END
        path = [span for span in self._path if span.first <= place < span.last]
        if not path:
            first = place - place % self._top
            last = first + self._top
            path.append(Span(first, last, self._state(first), self._state(last)))
        while path[-1].last - path[-1].first > self._leaf:
            whole = path[-1]
            middle = (whole.first + whole.last) // 2
            state = state_within(self._shares, whole, middle)
            first_half = Span(whole.first, middle, whole.before, state)
            second_half = Span(middle, whole.last, state, whole.after)
            path.append(first_half if place < middle else second_half)
        self._path = tuple(path)
        return path[-1]

    def _state(self, place: int) -> list[int]:
        """Counts at a multiple of the longest span: nothing before or behind restricts them."""
        sources = len(self._shares.parts)
        return state_within(
            self._shares, Span(0, 2 * place, [0] * sources, [place + 1] * sources), place
        )


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
