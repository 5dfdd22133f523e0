"""The source of each sample of a run: a pure function of the weights and the position.

The first n samples hold each source within one of its exact share, weight x n, for every n at once;
so a longer run starts as a shorter one, and no horizon, layout or restart plays a part. Weights are
fractions, all arithmetic is exact. There are three methods; the weights alone decide:

* Weights with a common denominator D up to MAX_TABLE repeat after D samples, and the places within
  a period are made once, by earliest deadlines (windows.py).
* Other weights go through a binary tree over the sources. Of m samples that reach a node, its first
  branch gets m x share, rounded to the nearest. A rounding error of at most 1/2 is passed down in
  proportion; the tree is chosen for the smallest sum, which is below 1 up to four sources.
* Where that sum is above 1, states at the middles of intervals are found down to a few hundred
  samples around the position, which earliest deadlines fill (`Halving` in windows.py).

Needs no data, no torch, no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from megalite.data.windows import Halving, Interval, Places, Shares, earliest_deadlines
from megalite.errors import ConfigError

MAX_TABLE = 1 << 16  # samples of a period
MAX_TREE_SEARCH = 24  # sources; above, the tree is cut in halves, not searched


class Blend:
    """The order of sources for weights of any sum; a source of weight 0 never occurs.

    Raises ConfigError for a negative weight, or if no weight is above 0.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        if not weights or min(weights) < 0 or not sum(weights):
            shown = ", ".join(str(weight) for weight in weights)
            raise ConfigError(f"blend weights [{shown}]; need 0 or more, and one above 0")
        total = sum(weights)
        self.weights = [Fraction(weight) / total for weight in weights]
        self._order = _order(self.weights)

    def at(self, first: int, count: int) -> Places:
        """Source and number of the samples first .. first + count - 1 of the run."""
        assert first >= 0
        assert count >= 0
        return self._order.at(first, count)

    def counts(self, n: int) -> list[int]:
        """Samples of each source among the first n."""
        assert n >= 0
        return self._order.counts(n)


def _order(weights: Sequence[Fraction]) -> _Table | _Tree | Halving:
    """The order for weights of sum 1, by the first method that keeps every source within one.

    It depends on nothing else, so a run that is resumed, or longer, has the same order.
    """
    shares = Shares.of(weights)
    if shares.whole <= MAX_TABLE:
        return _Table(shares)
    root = _best_tree(weights)
    if root is None or max(_errors(root, weights).values()) > 1:
        return Halving(weights)
    return _Tree(weights, root)


class _Table:
    """The order as one period, made by earliest deadline first, and its repetitions."""

    def __init__(self, shares: Shares) -> None:
        self._period = shares.whole
        self._per_period = np.array(shares.parts, dtype=np.int64)
        period = Interval(0, shares.whole, [0] * len(shares.parts), shares.parts)
        self._places = earliest_deadlines(shares, period)

    def at(self, first: int, count: int) -> Places:
        periods, places = np.divmod(np.arange(first, first + count, dtype=np.int64), self._period)
        source = self._places.source[places]
        return Places(source, periods * self._per_period[source] + self._places.number[places])

    def counts(self, n: int) -> list[int]:
        periods, rest = divmod(n, self._period)
        begun = np.bincount(self._places.source[:rest], minlength=len(self._per_period))
        return [
            periods * whole + int(part)
            for whole, part in zip(self._per_period.tolist(), begun, strict=True)
        ]


Node = Any  # of a tree without shares: a source's number, or a pair of nodes


class _Split(NamedTuple):
    """A node of the tree with two branches, and the first branch's share as a fraction."""

    first: _Split | int  # a node, or a source's number
    second: _Split | int
    numerator: int
    denominator: int

    def go_first(self, m: int) -> int:
        """The number of the first m samples that go to the first branch: m x share, rounded.

        Halves are rounded upwards.
        """
        return (2 * m * self.numerator + self.denominator) // (2 * self.denominator)


class _Tree:
    """The order by a binary tree. Counts are Python's integers: m x numerator may pass 64 bits."""

    def __init__(self, weights: Sequence[Fraction], root: Node) -> None:
        self._num_sources = len(weights)
        self._root = _with_shares(root, weights)

    def at(self, first: int, count: int) -> Places:
        source = np.zeros(count, dtype=np.int64)
        number = np.zeros(count, dtype=np.int64)
        # (node, first, places): the node's samples first, first + 1, ... go to these places.
        todo = [(self._root, first, np.arange(count))]
        while todo:
            node, first, places = todo.pop()
            if isinstance(node, int):
                source[places] = node
                number[places] = first + np.arange(len(places))
            elif len(places):
                begun = [node.go_first(first + step) for step in range(len(places) + 1)]
                goes_first = np.array([a != b for a, b in pairwise(begun)])
                todo.append((node.first, begun[0], places[goes_first]))
                todo.append((node.second, first - begun[0], places[~goes_first]))
        return Places(source, number)

    def counts(self, n: int) -> list[int]:
        counts = [0] * self._num_sources
        todo: list[tuple[_Split | int, int]] = [(self._root, n)]
        while todo:
            node, m = todo.pop()
            if isinstance(node, int):
                counts[node] = m
            else:
                first = node.go_first(m)
                todo += [(node.first, first), (node.second, m - first)]
        return counts


def _with_shares(node: Node, weights: Sequence[Fraction]) -> _Split | int:
    """The tree with the exact share of each first branch."""
    if isinstance(node, int):
        return node
    share = _weight(node[0], weights) / _weight(node, weights)
    first, second = (_with_shares(branch, weights) for branch in node)
    return _Split(first, second, share.numerator, share.denominator)


def _weight(node: Node, weights: Sequence[Fraction]) -> Fraction:
    """The sum of the weights below a node."""
    if isinstance(node, int):
        return weights[node]
    return _weight(node[0], weights) + _weight(node[1], weights)


def _errors(node: Node, weights: Sequence[Fraction]) -> dict[int, Fraction]:
    """The largest error of each source below a node, in samples, if the node's count is exact."""
    if isinstance(node, int):
        return {node: Fraction(0)}
    found = {}
    for branch in node:
        whole = _weight(branch, weights)
        for source, error in _errors(branch, weights).items():
            found[source] = error + weights[source] / whole / 2
    return found


def _best_tree(weights: Sequence[Fraction], limit: float = 1.0) -> Node | None:
    """The tree of smallest error over the sources by falling weight: searched, or cut in halves.

    None, as early as possible, if an error is clearly above the limit.
    """
    heaviest = sorted(range(len(weights)), key=lambda source: -weights[source])
    sources = [source for source in heaviest if weights[source]]
    # Floats choose the tree, fractions run it; a weight below all floats must not become 0.
    floats = [max(1e-300, float(weight)) for weight in weights]
    return _tree_over(sources, floats, 0.0, limit + 1e-6)


def _tree_over(
    sources: Sequence[int], weights: Sequence[float], above: float, limit: float
) -> Node | None:
    """The best tree over some sources; None if an error is above the limit.

    `above`: the error, for a weight of 1, that comes from the nodes above.
    """
    if len(sources) > MAX_TREE_SEARCH:
        middle = len(sources) // 2
        heavy, light = sources[:middle], sources[middle:]

        def below(half: Sequence[int]) -> Node | None:
            passed = above + 0.5 / sum(weights[source] for source in half)
            return _tree_over(half, weights, passed, limit)

        # The light half first: its weights are less even, so it exceeds the limit more often.
        light_tree = below(light)
        if light_tree is None:
            return None
        heavy_tree = below(heavy)
        return None if heavy_tree is None else (heavy_tree, light_tree)

    errors, root = _search([weights[source] for source in sources], sources)
    largest = max(
        error + weights[source] * above for error, source in zip(errors, sources, strict=True)
    )
    return root if largest <= limit else None


def _search(weights: Sequence[float], sources: Sequence[int]) -> tuple[list[float], Node]:
    """Each source's error and the best tree, if each node's branches are neighbouring runs.

    Dynamic programming: the best tree over a run of sources is the best cut of it into two runs.
    """
    # (start, stop) of a run of sources -> the errors in its best tree, and the tree
    best: dict[tuple[int, int], tuple[list[float], Node]] = {
        (n, n + 1): ([0.0], sources[n]) for n in range(len(sources))
    }
    for length in range(2, len(sources) + 1):
        for start in range(len(sources) - length + 1):
            stop = start + length
            cuts = (
                (_branch(best, weights, start, cut) + _branch(best, weights, cut, stop), cut)
                for cut in range(start + 1, stop)
            )
            errors, cut = min(cuts, key=lambda candidate: max(candidate[0]))
            best[start, stop] = (errors, (best[start, cut][1], best[cut, stop][1]))
    return best[0, len(sources)]


def _branch(best: Any, weights: Sequence[float], start: int, stop: int) -> list[float]:
    """The errors in the best tree over a run, as a branch: with the rounding error of its count."""
    whole = sum(weights[start:stop])
    inside = best[start, stop][0]
    return [e + w / whole / 2 for e, w in zip(inside, weights[start:stop], strict=True)]
