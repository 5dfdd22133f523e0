"""Rectangles against brute force: every range of small shapes, and random ones up to 4 dims."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.layout.rectangles import (
    Rectangle,
    find_overlap,
    global_rectangles,
    intersect,
    rectangles_of_range,
    split,
    why_not_cover,
)
from megalite.layout.sharding import ShardSpec

SHAPES = [(), (1,), (7,), (3, 5), (1, 6), (6, 1), (2, 3, 4), (3, 1, 3), (1, 2, 1, 4), (2, 2, 2, 3)]


def flat_indices(box: Rectangle, shape: tuple[int, ...]) -> list[int]:
    """Flat row-major index of each element of the box, in the box's own row-major order."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    ranges = [range(o, e) for o, e in zip(box.offsets, box.stops, strict=True)]
    return [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*ranges)
    ]


def boxes(shape: tuple[int, ...]) -> list[Rectangle]:
    """Every non-empty rectangle of a shape."""
    per_dim = [[(o, s) for o in range(n) for s in range(1, n - o + 1)] for n in shape]
    return [
        Rectangle(tuple(o for o, _ in pick), tuple(s for _, s in pick))
        for pick in itertools.product(*per_dim)
    ]


def fewest(shape: tuple[int, ...], start: int, stop: int, runs: dict[int, set[int]]) -> int:
    """Smallest number of contiguous boxes that make up [start, stop), by dynamic programming."""
    best = {start: 0}
    for position in range(start, stop):
        if position in best:
            for end in runs.get(position, set()):
                if end <= stop:
                    best[end] = min(best.get(end, stop), best[position] + 1)
    return best[stop]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_range_is_partitioned_in_order_by_the_fewest(shape: tuple[int, ...]) -> None:
    runs: dict[int, set[int]] = {}
    for box in boxes(shape):
        indices = flat_indices(box, shape)
        if indices == list(range(indices[0], indices[-1] + 1)):
            runs.setdefault(indices[0], set()).add(indices[-1] + 1)
    numel = math.prod(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            found = rectangles_of_range(shape, start, stop)
            assert [i for r in found for i in flat_indices(r, shape)] == list(range(start, stop))
            assert len(found) == fewest(shape, start, stop, runs)
            assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_random_cuts_of_a_random_tensor_cover_it_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), min_size=0, max_size=4)))
    numel = math.prod(shape)
    cuts = sorted([0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=5))])
    found = [r for a, b in itertools.pairwise(cuts) for r in rectangles_of_range(shape, a, b)]
    assert why_not_cover(shape, found) is None
    assert [i for r in found for i in flat_indices(r, shape)] == list(range(numel))


def test_empty_tensors_have_no_rectangles() -> None:
    for shape in [(0,), (3, 0), (0, 4)]:
        assert rectangles_of_range(shape, 0, 0) == []
        assert why_not_cover(shape, []) is None


@pytest.mark.parametrize("cut_dim", [None, 0, 1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tp_shards_map_to_global_elements(cut_dim: int | None, tp: int) -> None:
    spec = ShardSpec("w", (4, 8, 4), cut_dim)
    seen: list[int] = []
    for tp_rank in range(tp if cut_dim is not None else 1):
        local_shape, offsets = spec.local_shape(tp), spec.local_offsets(tp, tp_rank)
        numel = math.prod(local_shape)
        whole = Rectangle(offsets, local_shape)
        wanted = flat_indices(whole, spec.shape)
        for start, stop in [(0, 5), (5, numel - 3), (numel - 3, numel)]:
            found = global_rectangles(local_shape, offsets, start, stop)
            indices = [i for r in found for i in flat_indices(r, spec.shape)]
            assert indices == wanted[start:stop]
            seen += indices
    assert sorted(seen) == list(range(math.prod(spec.shape)))


@pytest.mark.parametrize("shape", [(5,), (3, 3), (2, 2, 2)])
def test_intersection_is_the_common_elements(shape: tuple[int, ...]) -> None:
    for a, b in itertools.product(boxes(shape), repeat=2):
        common = set(flat_indices(a, shape)) & set(flat_indices(b, shape))
        met = intersect(a, b)
        assert (set() if met is None else set(flat_indices(met, shape))) == common
        assert (find_overlap([a, b]) is not None) == bool(common)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_overlap_sweep_agrees_with_every_pair(data: st.DataObject) -> None:
    side = st.tuples(st.integers(0, 8), st.integers(0, 3))
    picks = data.draw(st.lists(st.tuples(side, side), max_size=8))
    found = [Rectangle((a, c), (b, d)) for (a, b), (c, d) in picks]
    pairs = itertools.combinations(found, 2)
    assert (find_overlap(found) is not None) == any(intersect(a, b) is not None for a, b in pairs)


def test_what_is_wrong_with_a_cover_is_said() -> None:
    rows = [Rectangle((r, 0), (1, 4)) for r in range(3)]
    assert why_not_cover((3, 4), rows) is None
    assert "8 of 12" in str(why_not_cover((3, 4), rows[1:]))
    assert "overlap" in str(why_not_cover((3, 4), [*rows, rows[0]]))
    assert "overlap" in str(why_not_cover((3, 4), [*rows[1:], Rectangle((1, 0), (1, 4))]))
    assert "outside" in str(why_not_cover((2, 4), rows))
    assert "not a rectangle" in str(why_not_cover((12,), rows))
    assert "not a rectangle" in str(why_not_cover((3, 4), [Rectangle((-1, 0), (1, 4))]))
    assert "overlap" in str(why_not_cover((), [Rectangle((), ()), Rectangle((), ())]))


@given(st.lists(st.integers(1, 6), min_size=0, max_size=4), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_split_keeps_elements_and_order_within_the_limit(sizes: list[int], limit: int) -> None:
    shape = tuple(s + 2 for s in sizes)
    box = Rectangle(tuple(1 for _ in sizes), tuple(sizes))
    parts = split(box, limit)
    assert all(p.volume <= limit for p in parts)
    assert [i for p in parts for i in flat_indices(p, shape)] == flat_indices(box, shape)


def test_needs_no_torch() -> None:
    code = "import sys; import megalite.layout.rectangles; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
