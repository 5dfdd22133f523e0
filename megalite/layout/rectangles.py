"""Contiguous ranges of row-major tensors as axis-aligned rectangles, and their intersections.

A checkpoint stores each rank's contiguous range as rectangles of the global tensor, which any other
layout can read. Pure arithmetic on tuples, independent of tensors and files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.wording import number_of


@dataclass(frozen=True, slots=True)
class Rectangle:
    """An axis-aligned box: the first index and the number of elements along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements; a rectangle of a 0-dim tensor holds one."""
        return math.prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last index along each dim."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def moved(self, by: Sequence[int]) -> Rectangle:
        """The same box with `by` added to its offsets: local to global coordinates."""
        return Rectangle(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.sizes)

    def relative_to(self, other: Rectangle) -> Rectangle:
        """The same box counted from the first corner of `other`."""
        return self.moved([-o for o in other.offsets])

    def slices(self) -> tuple[slice, ...]:
        """Index that cuts this box out of a tensor."""
        return tuple(slice(o, e) for o, e in zip(self.offsets, self.stops, strict=True))


def rectangles_of_range(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """Fewest rectangles that are [start, stop) of a row-major tensor of `shape`, in flat order.

    Each one is itself contiguous. At most 2 n - 1 for n dims: part of a row, whole rows, part of
    a row for a matrix.
    """
    shape = tuple(shape)
    assert 0 <= start <= stop <= math.prod(shape), f"range [{start}, {stop}) not inside {shape}"
    if start == stop:
        return []
    if not shape:
        return [Rectangle((), ())]
    inner, num_inner = shape[1:], math.prod(shape[1:])
    first, head = divmod(start, num_inner)
    last, tail = divmod(stop, num_inner)
    if first == last:
        return _under(first, rectangles_of_range(inner, head, tail))

    # Part of the first row, whole rows, part of the last one.
    found = []
    if head:
        found += _under(first, rectangles_of_range(inner, head, num_inner))
        first += 1
    if first < last:
        found.append(Rectangle((first, *(0 for _ in inner)), (last - first, *inner)))
    if tail:
        found += _under(last, rectangles_of_range(inner, 0, tail))
    return found


def _under(index: int, found: list[Rectangle]) -> list[Rectangle]:
    return [Rectangle((index, *r.offsets), (1, *r.sizes)) for r in found]


def global_rectangles(
    local_shape: Sequence[int], local_offsets: Sequence[int], start: int, stop: int
) -> list[Rectangle]:
    """[start, stop) of the flat local shard as rectangles of the global tensor, in flat order.

    `local_offsets`: the start of the shard in the global tensor (`ShardSpec.local_offsets`).
    """
    return [r.moved(local_offsets) for r in rectangles_of_range(local_shape, start, stop)]


def intersect(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """The part that two rectangles share, or None when they share no element."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    sizes = tuple(map(lambda e, f, o: min(e, f) - o, a.stops, b.stops, offsets))
    if any(s <= 0 for s in sizes):
        return None
    return Rectangle(offsets, sizes)


def find_overlap(rectangles: Sequence[Rectangle]) -> tuple[Rectangle, Rectangle] | None:
    """Two rectangles that share an element, or None when all are disjoint.

    Sweeps along the dim with the most different starts, so that thousands of pieces of one
    tensor cost far less than comparing every pair.
    """
    filled = [r for r in rectangles if r.volume]
    if len(filled) < 2:
        return None
    num_dims = len(filled[0].offsets)
    if num_dims == 0:
        return filled[0], filled[1]
    dim = max(range(num_dims), key=lambda d: len({r.offsets[d] for r in filled}))
    reaching: list[Rectangle] = []  # those that extend to the current offset
    for box in sorted(filled, key=lambda r: r.offsets[dim]):
        reaching = [r for r in reaching if r.stops[dim] > box.offsets[dim]]
        for other in reaching:
            if intersect(box, other) is not None:
                return other, box
        reaching.append(box)
    return None


def why_not_cover(shape: Sequence[int], rectangles: Sequence[Rectangle]) -> str | None:
    """The reason why rectangles do not cover `shape`, each element once; None if they do."""
    for box in rectangles:
        fits = len(box.offsets) == len(box.sizes) == len(shape)
        if not fits or any(o < 0 or s < 0 for o, s in zip(box.offsets, box.sizes, strict=True)):
            return f"{box} is not a rectangle of shape {tuple(shape)}"
        if any(e > n for e, n in zip(box.stops, shape, strict=True)):
            return f"{box} reaches outside shape {tuple(shape)}"
    overlap = find_overlap(rectangles)
    if overlap is not None:
        return f"{overlap[0]} and {overlap[1]} overlap"
    covered, wanted = sum(r.volume for r in rectangles), math.prod(shape)
    if covered != wanted:
        return f"{covered} of {number_of(wanted, 'element')} of shape {tuple(shape)} are there"
    return None


def split(box: Rectangle, max_elements: int) -> list[Rectangle]:
    """Cut a rectangle into slabs of at most `max_elements`, in row-major order."""
    assert max_elements >= 1
    if box.volume <= max_elements:
        return [box]
    dim = next(d for d, size in enumerate(box.sizes) if size > 1)
    step = max(1, max_elements // (box.volume // box.sizes[dim]))
    slabs = []
    for first in range(0, box.sizes[dim], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += first
        sizes[dim] = min(step, box.sizes[dim] - first)
        slabs += split(Rectangle(tuple(offsets), tuple(sizes)), max_elements)
    return slabs
