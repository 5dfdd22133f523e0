"""Where parameters lie in the flat buffers: pure arithmetic on element counts.

Two kinds of buckets. *Sliced*: parameters one after the other, and each rank owns an equal slice
wherever it cuts. *Whole*: each rank's slice is made of whole parameters, for algorithms that need
whole matrices; the price is padding where matrices do not divide evenly.

Alignment rule: every parameter starts at a multiple of `ALIGN` elements and every bucket is a
multiple of `ALIGN * num_shards` long. Then a shard never starts inside a vector register, and an
element's update cannot depend on where in the buffer it lies: replicas stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

ALIGN = 16  # elements: one 64-byte cache line of fp32, two of fp64

# A bucket of whole parameters is closed once it is full and pads no more than this share.
_MAX_WASTE = 1 / 8


@dataclass(frozen=True)
class BucketPlan:
    """Where one bucket lies, in elements of the flat buffer; `items` index the planned sequence.

    `items` are in the order of their `starts`.
    """

    start: int
    stop: int
    items: tuple[int, ...]
    starts: tuple[int, ...]
    alone: bool  # a tied weight: both stages must cut it alike, so nothing may lie beside it
    whole: bool = False  # each of the shards holds whole parameters

    def moved(self, start: int, items: Sequence[int]) -> BucketPlan:
        """The same bucket at another start, with `items[i]` for each item i."""
        shift = start - self.start
        return replace(
            self,
            start=start,
            stop=self.stop + shift,
            items=tuple(items[i] for i in self.items),
            starts=tuple(s + shift for s in self.starts),
        )


def plan_chunk(
    numels: Sequence[int],
    alone: Sequence[bool],
    whole: Sequence[bool],
    capacity: int,
    num_shards: int,
    num_owners: int,
) -> list[BucketPlan]:
    """Plan a chunk's parameters, given in the order in which backward finishes them.

    Sliced and whole parameters have buckets of their own, in the order in which they fill.
    `num_owners`: over how many ranks whole parameters are spread; it divides `num_shards`.
    """
    sliced_items = [i for i, flag in enumerate(whole) if not flag]
    whole_items = [i for i, flag in enumerate(whole) if flag]
    sliced = plan_buckets(
        [numels[i] for i in sliced_items], [alone[i] for i in sliced_items], capacity, num_shards
    )
    owned = plan_whole(
        [numels[i] for i in whole_items], capacity, num_owners, ALIGN * num_shards // num_owners
    )
    plans = [plan.moved(plan.start, sliced_items) for plan in sliced]
    plans += [plan.moved(plan.start, whole_items) for plan in owned]
    placed: list[BucketPlan] = []
    end = 0
    for plan in sorted(plans, key=lambda p: max(p.items)):
        placed.append(plan.moved(end, range(len(numels))))
        end = placed[-1].stop
    return placed


def plan_buckets(
    numels: Sequence[int], alone: Sequence[bool], capacity: int, num_shards: int
) -> list[BucketPlan]:
    """Cut a sequence of parameters into buckets of at most `capacity` elements, padding included.

    A parameter larger than `capacity`, and each one marked `alone`, gets a bucket of its own.
    """
    buckets: list[BucketPlan] = []
    items: list[int] = []
    starts: list[int] = []
    start = end = 0

    def close(is_alone: bool = False) -> None:
        nonlocal start, end
        if items:
            end = start + _round_up(end - start, ALIGN * num_shards)
            buckets.append(BucketPlan(start, end, tuple(items), tuple(starts), is_alone))
            items.clear()
            starts.clear()
            start = end

    for item, numel in enumerate(numels):
        if alone[item] or end + numel - start > capacity:
            close()
        items.append(item)
        starts.append(end)
        end = _round_up(end + numel, ALIGN)
        if alone[item]:
            close(is_alone=True)
    close()
    return buckets


def plan_whole(
    numels: Sequence[int], capacity: int, num_owners: int, align: int
) -> list[BucketPlan]:
    """Buckets of which each of `num_owners` equal shards holds whole parameters.

    A bucket takes parameters until it has `capacity` elements and its padding is small; what is
    left over joins the last one if it would be mostly padding by itself. Shards are multiples of
    `align` (itself a multiple of ALIGN) long.
    """
    groups: list[list[int]] = []
    current: list[int] = []
    for item in range(len(numels)):
        current.append(item)
        full = sum(numels[i] for i in current) >= capacity
        if full and _waste(numels, current, num_owners) <= _MAX_WASTE:
            groups.append(current)
            current = []
    if current and groups and _waste(numels, current, num_owners) > _MAX_WASTE:
        groups[-1] += current
    elif current:
        groups.append(current)
    plans: list[BucketPlan] = []
    start = 0
    for group in groups:
        plan = _spread(numels, group, num_owners, align, start)
        plans.append(plan)
        start = plan.stop
    return plans


def assign(sizes: Sequence[int], num_owners: int) -> list[int]:
    """An owner for each item: the largest first, each to the owner with the least so far.

    Graham's longest-processing-time rule: at most 4/3 of the best possible largest load.
    """
    loads = [0] * num_owners
    owner_of = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = min(range(num_owners), key=lambda o: (loads[o], o))
        owner_of[item] = owner
        loads[owner] += sizes[item]
    return owner_of


def _waste(numels: Sequence[int], group: Sequence[int], num_owners: int) -> float:
    """Padding of a bucket of whole parameters, as a share of what it holds."""
    sizes = [numels[i] for i in group]
    loads = [0] * num_owners
    for size, owner in zip(sizes, assign(sizes, num_owners), strict=True):
        loads[owner] += size
    return max(loads) * num_owners / sum(sizes) - 1


def _spread(
    numels: Sequence[int], group: Sequence[int], num_owners: int, align: int, start: int
) -> BucketPlan:
    sizes = [_round_up(numels[i], ALIGN) for i in group]
    loads = [0] * num_owners
    offsets: list[tuple[int, int, int]] = []  # owner, offset in its shard, item
    for item, size, owner in zip(group, sizes, assign(sizes, num_owners), strict=True):
        offsets.append((owner, loads[owner], item))
        loads[owner] += size
    shard = _round_up(max(loads), align)
    offsets.sort()
    return BucketPlan(
        start=start,
        stop=start + num_owners * shard,
        items=tuple(item for _, _, item in offsets),
        starts=tuple(start + owner * shard + offset for owner, offset, _ in offsets),
        alone=False,
        whole=True,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
