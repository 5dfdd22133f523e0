"""The source of each sample of a run: a pure function of the weights and the position.

The order repeats after as many samples as the weights have parts in all, D (up to 65,536, see
`config.shares.blend_parts`). It is a schedule of jobs: sample j of a source with p parts may stand
no earlier than floor(j D / p) and no later than ceil((j + 1) D / p) - 1, which is the same as that
every prefix of n samples holds n p / D of that source, within one (Baruah, Cohen, Plaxton and
Varvel, "Proportionate progress", 1996). Earliest deadline first meets all of them. Neither the
length of the run nor its layout plays a part. Needs no data, no torch, no files.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.config.shares import blend_parts


class Places(NamedTuple):
    """Samples in order: the source of each, and its number within that source (from 0)."""

    source: NDArray[np.int64]
    number: NDArray[np.int64]


class Blend:
    """The order of sources for weights of any sum; a source of weight 0 never occurs.

    It begins at the run's sample `start`, `before` which each source has given so many.
    """

    def __init__(
        self, weights: Sequence[Fraction | int], start: int = 0, before: Sequence[int] = (0,)
    ) -> None:
        self._parts = np.array(blend_parts(weights), dtype=np.int64)
        self._period = _earliest_deadlines(self._parts)
        self._start = start
        self._before = np.broadcast_to(np.array(before, dtype=np.int64), self._parts.shape)

    def at(self, first: int, count: int) -> Places:
        """Source and number of the samples first .. first + count - 1 of the run."""
        assert first >= self._start
        wanted = np.arange(first, first + count, dtype=np.int64) - self._start
        periods, places = np.divmod(wanted, len(self._period.source))
        source = self._period.source[places]
        number = periods * self._parts[source] + self._period.number[places]
        return Places(source, self._before[source] + number)

    def counts(self, n: int) -> list[int]:
        """Samples of each source among the first n."""
        periods, rest = divmod(n - self._start, len(self._period.source))
        begun = np.bincount(self._period.source[:rest], minlength=len(self._parts))
        counts: list[int] = (self._before + periods * self._parts + begun).tolist()
        return counts


def _earliest_deadlines(parts: NDArray[np.int64]) -> Places:
    """The order of one period: each place gets the released sample of the earliest deadline.

    Ties go to the source of the lower number.
    """
    whole = int(parts.sum())
    source = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(whole) - np.repeat(np.cumsum(parts) - parts, parts)
    release = number * whole // parts[source]
    deadline = -(-(number + 1) * whole // parts[source])

    # The heap holds the samples that are released and have no place yet.
    columns = (release, deadline, source, number)
    coming = sorted(zip(*(column.tolist() for column in columns), strict=True), reverse=True)
    ready: list[tuple[int, ...]] = []
    order = []
    for place in range(whole):
        while coming and coming[-1][0] <= place:
            heapq.heappush(ready, coming.pop()[1:])
        order.append(heapq.heappop(ready)[1:])

    placed = np.array(order, dtype=np.int64)
    return Places(placed[:, 0], placed[:, 1])
