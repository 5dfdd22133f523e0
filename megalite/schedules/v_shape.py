"""Builders of schedules on the V placement: chunk 0 of rank r is stage r, chunk 1 stage 2p - 1 - r.

First and last stage share rank 0, and the fold in the middle needs no transfer. Reading order:
`zero_bubble_v` (arXiv 2405.15362), `dualpipe_v` (arXiv 2412.19437 cut in half), `controllable`
(the half and the minimum of memory, arXiv 2405.15362). All have two chunks per rank and split
backwards. Written from the published descriptions.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from megalite.errors import ScheduleError
from megalite.schedules.action import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
)
from megalite.schedules.builders import check_counts


def v_place(p: int) -> tuple[int, ...]:
    """Rank of each of the 2p stages."""
    return (*range(p), *reversed(range(p)))


@dataclass
class _Rank:
    """A rank's list in the making: each kind of each chunk takes its microbatches in order."""

    p: int
    rank: int
    actions: list[Action] = field(default_factory=list)
    done: Counter[tuple[str, int]] = field(default_factory=Counter)
    deferred: deque[Action] = field(default_factory=deque)  # weight gradients, oldest first

    def add(self, kind: str, chunk: int) -> Action:
        """Append the action of a kind on the chunk's next microbatch, and return it."""
        stage = self.rank if chunk == 0 else 2 * self.p - 1 - self.rank
        action = Action(kind, stage, self.done[kind, chunk])
        self.done[kind, chunk] += 1
        self.actions.append(action)
        return action

    def forward(self, chunk: int) -> None:
        """Append a forward."""
        self.add(FORWARD, chunk)

    def backward_input(self, chunk: int) -> None:
        """Append an input gradient and defer its weight gradient."""
        done = self.add(BACKWARD_INPUT, chunk)
        self.deferred.append(done._replace(kind=BACKWARD_WEIGHT))

    def backward(self, chunk: int) -> None:
        """Append an input gradient and directly after it its own weight gradient."""
        done = self.add(BACKWARD_INPUT, chunk)
        self.actions.append(done._replace(kind=BACKWARD_WEIGHT))

    def backward_and_oldest_weight(self, chunk: int) -> None:
        """Append an input gradient, then the weight gradient of the chunk that is due longest."""
        self.add(BACKWARD_INPUT, chunk)
        self.add(BACKWARD_WEIGHT, chunk)

    def deferred_weight(self) -> None:
        """Append the weight gradient that has been deferred longest."""
        self.actions.append(self.deferred.popleft())


def zero_bubble_v(p: int, m: int) -> Schedule:
    """ZB-V: no span bubble at equal times, memory p on every rank. Best for m >= 2p."""
    check_counts(p, 2, m)
    # Built for at least 2p - 1 microbatches, which fill the pipeline, and then cut to m of them.
    ranks = (_zero_bubble_rank(p, rank, max(m, 2 * p - 1)) for rank in range(p))
    return Schedule(m, v_place(p), tuple(tuple(a for a in r if a.mb < m) for r in ranks))


def _zero_bubble_rank(p: int, rank: int, n: int) -> list[Action]:
    """The list for n >= 2p - 1 microbatches: warm-up, steady state, cool-down."""
    row = _Rank(p, rank)

    # Warm-up: forwards until the first microbatch has come back from the fold to chunk 1, after
    # 2(p - rank) - 1 slots with its own; then the first backwards of chunk 1.
    for _ in range(2 * (p - rank) - 1):
        row.forward(0)
    for _ in range(rank):
        row.forward(1)
        row.forward(0)
    for _ in range(p - rank):
        row.forward(1)
        row.backward_and_oldest_weight(1)

    # Steady state: one of each kind on both chunks, so that what the rank holds stays the same.
    while row.done[FORWARD, 1] < row.done[FORWARD, 0] or row.done[FORWARD, 0] < n:
        if row.done[FORWARD, 0] < n:
            row.forward(0)
        row.backward_and_oldest_weight(0)
        row.forward(1)
        row.backward_and_oldest_weight(1)

    # Cool-down: input gradients first, because other ranks wait for them; weight gradients fill
    # the slots in which this rank would wait, and the rest come last.
    for _ in range(rank):
        row.add(BACKWARD_INPUT, 0)
        row.add(BACKWARD_INPUT, 1)
    for _ in range(p - rank):
        row.backward_and_oldest_weight(0)
    for chunk in (1, 0):
        while row.done[BACKWARD_WEIGHT, chunk] < n:
            row.add(BACKWARD_WEIGHT, chunk)
    return row.actions


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipeV with its paired forwards and backwards one after the other.

    Of use where a forward really overlaps a backward, as with expert parallelism. Raises
    ScheduleError unless m >= 2p.
    """
    check_counts(p, 2, m)
    if m < 2 * p:
        raise ScheduleError(
            f"dualpipe-v needs m >= 2p microbatches, got m={m} for p={p}; use m >= {2 * p} or zb-v"
        )
    return Schedule(m, v_place(p), tuple(tuple(_dualpipe_rank(p, r, m)) for r in range(p)))


def _dualpipe_rank(p: int, rank: int, m: int) -> list[Action]:
    """The eight phases of DualPipe, numbered as there, on the half that is left."""
    row = _Rank(p, rank)
    after, upto = p - rank - 1, rank + 1  # ranks after this one; ranks up to it, itself included

    # 1 to 3, warm-up: chunk 0 fills the ranks after this one, then chunk 1 comes back from them.
    for _ in range(2 * after):
        row.forward(0)
    for _ in range(upto):
        row.forward(0)
        row.forward(1)
    for _ in range(after):
        row.backward_input(1)
        row.deferred_weight()
        row.forward(1)

    # 4 and 5, steady state: DualPipe would overlap each forward with the backward next to it. In
    # phase 5 no forward of chunk 0 is left.
    for _ in range(m - 2 * p + upto):
        row.forward(0)
        row.backward(1)
        row.forward(1)
        row.backward(0)
    for _ in range(after):
        row.backward(1)
        row.forward(1)
        row.backward(0)

    # 6, cool-down: its second half defers weight gradients, so that the input gradients, which
    # other ranks wait for, come earlier. Rank parity decides for chunk 1 in the middle.
    for index in range(upto):
        split_1 = index > upto // 2 or (index == upto // 2 and rank % 2 == 1)
        split_0 = index >= upto // 2
        for chunk, split in ((1, split_1), (0, split_0)):
            if split:
                row.backward_input(chunk)
            else:
                row.backward(chunk)

    # 7 and 8: the deferred weight gradients fill the waits for the last gradients, and the end.
    for _ in range(after):
        row.deferred_weight()
        row.backward_input(0)
    while row.deferred:
        row.deferred_weight()
    return row.actions


def controllable(p: int, m: int, *, minimum: bool) -> Schedule:
    """V-min (memory about p/3 + 1) or V-half (p/2 + 1): microbatches repeat every six slots.

    Weight gradients take the free slots, first in, first out; then each rank runs its slots in
    order, as early as it can. V-half is not reordered afterwards, so its bubble is about
    1.8 (p - 1) at equal times where the published heuristic reaches 0.5 to 1.4.
    """
    check_counts(p, 2, m)
    ranks = tuple(tuple(_slotted_rank(p, rank, m, minimum=minimum)) for rank in range(p))
    return Schedule(m, v_place(p), ranks)


def _slots(p: int, r: int, *, minimum: bool) -> dict[tuple[str, int], int]:
    """(kind, chunk) -> slot of microbatch 0 on rank r."""
    # `shift` keeps two actions out of one slot, as slots repeat modulo 6.
    if minimum:
        shift = 2 if p % 3 == 0 else 0
        slots = (r, 2 * p - r - 1, 2 * p + shift + r, 4 * p + shift - r - 1)
    else:
        shift = 3 if p % 2 == 0 else 0
        slots = (2 * r, 3 * p - r - 2, 3 * p + shift + 2 * r - 1, 6 * p + shift - r - 2)
    keys = ((FORWARD, 0), (FORWARD, 1), (BACKWARD_INPUT, 1), (BACKWARD_INPUT, 0))
    return dict(zip(keys, slots, strict=True))


def _slotted_rank(p: int, rank: int, m: int, *, minimum: bool) -> list[Action]:
    slots = _slots(p, rank, minimum=minimum)
    at = {
        slot + 6 * mb: Action(kind, rank if chunk == 0 else 2 * p - 1 - rank, mb)
        for (kind, chunk), slot in slots.items()
        for mb in range(m)
    }
    actions: list[Action] = []
    deferred: deque[Action] = deque()
    for slot in range(max(at) + 1):
        action = at.get(slot)
        if action is not None:
            actions.append(action)
            if action.kind == BACKWARD_INPUT:
                deferred.append(action._replace(kind=BACKWARD_WEIGHT))
        elif deferred:
            actions.append(deferred.popleft())
    return [*actions, *deferred]
