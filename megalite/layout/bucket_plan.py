"""The plan of the flat buffers, bucket by bucket: pure arithmetic on element counts.

Two kinds of buckets. *Sliced*: parameters one after the other, and each rank owns an equal slice
wherever it cuts. *Whole*: each rank's slice is made of whole parameters, for algorithms that need
whole matrices; the price is padding where matrices do not divide evenly. Parameters whose gradients
are summed over other ranks are never in one bucket.

Alignment rule: every parameter starts at a multiple of `ALIGN` elements and every bucket is a
multiple of `ALIGN * num_shards` long. Then a shard never starts inside a vector register, and an
element's update cannot depend on where in the buffer it lies: replicas stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

ALIGN = 16  # elements: one 64-byte cache line of fp32, two of fp64

# Buckets whose gradients are sent in a narrower type, and of which copies are alive, at a time.
ROUNDED_IN_FLIGHT = 2

# A bucket of whole parameters is closed once it is full and pads no more than this share.
_MAX_WASTE = 1 / 8


@dataclass(frozen=True)
class BucketPlan:
    """One bucket's place [start, stop) in the flat buffer, in elements, and those of its items.

    `items` are indices into the planned sequence, in the order of their `starts`.
    """

    start: int
    stop: int
    items: tuple[int, ...]
    starts: tuple[int, ...]
    tied: bool = False  # one weight alone: the stages that hold it must cut it alike
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


@dataclass(frozen=True)
class BucketItem:
    """A parameter to plan: its elements on this rank, and the rules for its bucket.

    `grid`: items of different grids are in different buckets. `num_shards`: the number of ranks
    over which its gradient is reduced; `num_owners`: the number of them over which its optimizer
    state is spread, a divisor of `num_shards`. `whole`: a single owner has all of it.
    """

    numel: int
    grid: Hashable
    num_shards: int
    num_owners: int
    tied: bool = False
    whole: bool = False


def plan_chunk(items: Sequence[BucketItem], capacity: int) -> list[BucketPlan]:
    """Plan a chunk's parameters, given in the order in which backward finishes them.

    Buckets of different grids, and of sliced and whole parameters, lie in the order in which they
    fill.
    """
    # Per grid, because a bucket is reduced over the ranks of one grid.
    plans: list[BucketPlan] = []
    for grid in dict.fromkeys(item.grid for item in items):
        mine = [i for i, item in enumerate(items) if item.grid == grid]
        shards, owners = items[mine[0]].num_shards, items[mine[0]].num_owners
        sliced = [i for i in mine if not items[i].whole]
        whole = [i for i in mine if items[i].whole]
        tied = [items[i].tied for i in sliced]
        in_slices = plan_buckets([items[i].numel for i in sliced], tied, capacity, shards)
        owned = plan_whole(
            [items[i].numel for i in whole], capacity, owners, ALIGN * shards // owners
        )
        plans += [plan.moved(plan.start, sliced) for plan in in_slices]
        plans += [plan.moved(plan.start, whole) for plan in owned]

    # In the order in which backward fills them: a bucket is full when its last item is.
    placed: list[BucketPlan] = []
    end = 0
    for plan in sorted(plans, key=lambda p: max(p.items)):
        placed.append(plan.moved(end, range(len(items))))
        end = placed[-1].stop
    return placed


def plan_buckets(
    numels: Sequence[int], tied: Sequence[bool], capacity: int, num_shards: int
) -> list[BucketPlan]:
    """Cut a sequence of parameters into buckets of at most `capacity` elements, padding included.

    A parameter larger than `capacity`, and each `tied` one, gets a bucket of its own.
    """
    buckets: list[BucketPlan] = []
    items: list[int] = []
    starts: list[int] = []
    start = end = 0

    def close(is_tied: bool = False) -> None:
        nonlocal start, end
        if items:
            end = start + _round_up(end - start, ALIGN * num_shards)
            buckets.append(BucketPlan(start, end, tuple(items), tuple(starts), is_tied))
            items.clear()
            starts.clear()
            start = end

    # A tied weight is alone, so that both of its stages cut and reduce it alike.
    for item, numel in enumerate(numels):
        if tied[item] or end + numel - start > capacity:
            close()
        items.append(item)
        starts.append(end)
        end = _round_up(end + numel, ALIGN)
        if tied[item]:
            close(is_tied=True)
    close()
    return buckets


def plan_whole(
    numels: Sequence[int], capacity: int, num_owners: int, align: int
) -> list[BucketPlan]:
    """Buckets in which each of `num_owners` equal shards is made of whole parameters.

    A bucket takes parameters until it has `capacity` elements and its padding is at most
    `_MAX_WASTE`. The last parameters join the bucket before them if their own would be padded more.
    Shards are multiples of `align` (itself a multiple of ALIGN) long.
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

    # Only now, as the last group may have grown.
    plans: list[BucketPlan] = []
    start = 0
    for group in groups:
        plan = _spread(numels, group, num_owners, align, start)
        plans.append(plan)
        start = plan.stop
    return plans


def assign(sizes: Sequence[int], num_owners: int) -> list[int]:
    """The owner of each item: the largest item first, each to the owner with the least load so far.

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
    """Padding of a bucket of whole parameters, as a share of its parameters' elements."""
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
        whole=True,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
