"""Orders of sources in which every prefix holds each source within one of its exact share.

This is a scheduling problem: sample j of a source is a job, the positions of the run (places) are
slots of time, and each place takes one job. Sample j of a source of weight w may stand no earlier
than floor(j / w) and no later than ceil((j + 1) / w) - 1, its window: that is the same as
|count - w n| < 1 at every n (proportionate progress: Baruah, Cohen, Plaxton and Varvel 1996).
Earliest deadline first meets all windows, but only by walking from the start. `Halving` reaches any
place at once for any weights, by states: counts of all sources at chosen places n, each floor(w n)
or, where that source's begun job is done, one more.

* Let f be the fractions w n - floor(w n) of the begun jobs. A state is chosen such that of the jobs
  released before any time, at least floor(sum of their f) are done, and of those due after any
  time, at most ceil(sum of their f). The first lets the places before n be filled, whatever the
  state there; the second those behind: it is Hall's condition for jobs of one place each.
* At multiples of 1 / (smallest weight) or more, no job spans two of these, and f itself is a
  fractional choice; two chains of sets are totally unimodular, so there is a whole one (two-way
  rounding: Knuth 1995).
* Between two states at a and b the state at m also agrees with both: a job done at a is done, a job
  not done at b is not. With conditions only for times within a .. b a choice again exists. By
  Hoffman's circulation theorem these cuts suffice, where R are jobs released before s >= a, L those
  due after t <= b, F1 and F0 the jobs kept done and not done (so F1 lies in all R, F0 in all L):
  floor f(R) <= ceil f(L) + |R - L|; |F1 in L| <= ceil f(L), as the state at a promised, and f only
  grows; |F0 in R| <= ceil sum (1 - f) over R, as that at b promised; and these two for all jobs.
* The choice with the earliest deadlines of all that meet the first condition is greedy (the bases
  of a matroid), and the smallest deadline by deadline; so it meets the second when any does.

So intervals are halved down to a few hundred places, which earliest deadline first fills from one
state to the next. All numbers are Python's integers and exact. Needs no data, no torch, no files.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

END = 1 << 63  # places are below it
LEAF = 512  # places of an interval that is filled and not halved again, or more with many sources
KEPT = 4  # filled intervals that are cached: as many as a few readers of neighbouring steps use


class Places(NamedTuple):
    """Samples in order: the source of each, and its number within that source (from 0)."""

    source: NDArray[np.int64]
    number: NDArray[np.int64]


class Shares(NamedTuple):
    """Weights of the sources, parts[source] / whole, which add up to 1."""

    parts: tuple[int, ...]
    whole: int

    @classmethod
    def of(cls, weights: Sequence[Fraction]) -> Shares:
        """The weights with one denominator."""
        whole = lcm(*(weight.denominator for weight in weights))
        return cls(tuple(int(weight * whole) for weight in weights), whole)

    def release(self, source: int, number: int) -> int:
        """The first place that a job may have."""
        return number * self.whole // self.parts[source]

    def deadline(self, source: int, number: int) -> int:
        """The first place that a job may no longer have."""
        return -(-(number + 1) * self.whole // self.parts[source])


class Interval(NamedTuple):
    """Places start .. stop - 1, with the counts of all sources (states) at both ends."""

    start: int
    stop: int
    before: Sequence[int]  # counts among the places before `start`
    after: Sequence[int]  # counts among the places before `stop`


def earliest_deadlines(shares: Shares, interval: Interval) -> Places:
    """The order within an interval: each place gets the released job of the earliest deadline.

    Ties go to the source of the lower number.
    """
    start, stop, before, after = interval

    # A source's next job, until its release; its later jobs follow one by one.
    waiting = [  # release first
        (shares.release(source, number), source, number)
        for source, number in enumerate(before)
        if number < after[source]
    ]
    heapq.heapify(waiting)

    ready: list[tuple[int, int, int]] = []  # deadline first
    sources, numbers = [], []
    for place in range(start, stop):
        while waiting and waiting[0][0] <= place:
            _, source, number = heapq.heappop(waiting)
            deadline = min(stop, shares.deadline(source, number))
            heapq.heappush(ready, (deadline, source, number))
        deadline, source, number = heapq.heappop(ready)
        assert place < deadline, "windows between two states can always be met"
        sources.append(source)
        numbers.append(number)
        if number + 1 < after[source]:
            heapq.heappush(waiting, (shares.release(source, number + 1), source, number + 1))
    return Places(np.array(sources, dtype=np.int64), np.array(numbers, dtype=np.int64))


def state_within(shares: Shares, interval: Interval, middle: int) -> list[int]:
    """A state at the place `middle` that fits those at the interval's ends.

    That is: the places on both sides can be filled so that every job meets its window.
    """
    # Every job that is due by then is done. A begun one may be done or not, to be chosen below.
    counts, begun = [], []
    for source, part in enumerate(shares.parts):
        number, done = divmod(part * middle, shares.whole)
        counts.append(number)
        if done:
            begun.append((shares.release(source, number), source, done))

    # By release: of the jobs released before each time, at least floor(sum of their fractions) must
    # be done. The states at the ends decide some; of the free ones the earliest deadlines go first.
    free: list[tuple[int, int]] = []  # earliest deadline first
    taken = fractions = 0
    time = interval.start - 1
    for release, source, done in sorted(begun):
        if release > time:  # all jobs released before `release` are known now
            taken += _take(free, fractions // shares.whole - taken, counts)
            time = release
        fractions += done
        if interval.before[source] > counts[source]:
            counts[source] += 1
            taken += 1
        elif interval.after[source] > counts[source]:
            heapq.heappush(free, (shares.deadline(source, counts[source]), source))
    _take(free, fractions // shares.whole - taken, counts)
    return counts


def _take(free: list[tuple[int, int]], need: int, counts: list[int]) -> int:
    """Count the `need` free jobs of the earliest deadlines as done; returns their number."""
    for _ in range(need):
        _, source = heapq.heappop(free)
        counts[source] += 1
    return max(0, need)


class _Filled(NamedTuple):
    """An interval with the order of its places."""

    interval: Interval
    places: Places


class Halving:
    """The order for any weights that add up to 1, by states at the middles of intervals."""

    def __init__(self, weights: Sequence[Fraction], leaf: int | None = None) -> None:
        """`leaf`: places filled at once, a power of two; None: chosen by the number of sources."""
        self._shares = Shares.of(weights)
        self._leaf = leaf or max(LEAF, _power_of_two(8 * len(weights)))
        # No job is long enough to span two multiples of `_top`, so at each a state exists, whatever
        # the others are (see the top of this file).
        smallest = min(part for part in self._shares.parts if part)
        longest = -(-self._shares.whole // smallest)
        self._top = min(END, max(self._leaf, _power_of_two(longest)))
        # Caches of the last call. Each is replaced as a whole, so threads may share them.
        self._path: tuple[Interval, ...] = ()
        self._filled: tuple[_Filled, ...] = ()

    def at(self, first: int, count: int) -> Places:
        """Samples first .. first + count - 1 of the run."""
        stop = first + count
        source, number = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        place = first
        while place < stop:
            leaf, places = self._fill(place)
            end = min(stop, leaf.stop)
            target = slice(place - first, end - first)
            taken = slice(place - leaf.start, end - leaf.start)
            source[target], number[target] = places.source[taken], places.number[taken]
            place = end
        return Places(source, number)

    def counts(self, n: int) -> list[int]:
        """Samples of each source among the first n."""
        leaf, places = self._fill(n)
        begun = np.bincount(places.source[: n - leaf.start], minlength=len(leaf.before))
        return [before + more for before, more in zip(leaf.before, begun.tolist(), strict=True)]

    def _fill(self, place: int) -> _Filled:
        """The filled leaf that holds a place."""
        filled = self._filled
        for known in filled:
            if known.interval.start <= place < known.interval.stop:
                return known
        leaf = self._descend(place)
        new = _Filled(leaf, earliest_deadlines(self._shares, leaf))
        self._filled = (new, *filled[: KEPT - 1])
        return new

    def _descend(self, place: int) -> Interval:
        """The leaf that holds a place, by halving; starts on the path to the last leaf."""
        assert place < END
        path = [known for known in self._path if known.start <= place < known.stop]
        if not path:
            start = place - place % self._top
            stop = start + self._top
            path.append(Interval(start, stop, self._state(start), self._state(stop)))
        while path[-1].stop - path[-1].start > self._leaf:
            whole = path[-1]
            middle = (whole.start + whole.stop) // 2
            state = state_within(self._shares, whole, middle)
            first_half = Interval(whole.start, middle, whole.before, state)
            second_half = Interval(middle, whole.stop, state, whole.after)
            path.append(first_half if place < middle else second_half)
        self._path = tuple(path)
        return path[-1]

    def _state(self, place: int) -> list[int]:
        """The state at a multiple of `_top`, which no other state restricts.

        `state_within` gets an interval around it whose states at the ends leave all jobs free.
        """
        sources = len(self._shares.parts)
        unrestricted = Interval(0, 2 * place, [0] * sources, [place + 1] * sources)
        return state_within(self._shares, unrestricted, place)


def _power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()
