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
    pending: deque[Action] = field(default_factory=deque)  # weight gradients that are put off

    def add(self, kind: str, chunk: int) -> Action:
        stage = self.rank if chunk == 0 else 2 * self.p - 1 - self.rank
        action = Action(kind, stage, self.done[kind, chunk])
        self.done[kind, chunk] += 1
        self.actions.append(action)
        return action

    def forward(self, chunk: int) -> None:
        self.add(FORWARD, chunk)

    def backward_input(self, chunk: int) -> None:
        """The input gradient; its weight gradient waits in line."""
        done = self.add(BACKWARD_INPUT, chunk)
        self.pending.append(done._replace(kind=BACKWARD_WEIGHT))

    def backward(self, chunk: int) -> None:
        """The input gradient and at once its own weight gradient."""
        done = self.add(BACKWARD_INPUT, chunk)
        self.actions.append(done._replace(kind=BACKWARD_WEIGHT))

    def weight(self) -> None:
        """The oldest weight gradient in line."""
        self.actions.append(self.pending.popleft())


def zero_bubble_v(p: int, m: int) -> Schedule:
    """ZB-V: no span bubble at equal times, memory p on every rank. Best for m >= 2p."""
    check_counts(p, 2, m)
    ranks = (_zero_bubble_rank(p, rank, max(m, 2 * p - 1)) for rank in range(p))
    return Schedule(m, v_place(p), tuple(tuple(a for a in r if a.mb < m) for r in ranks))


def _zero_bubble_rank(p: int, rank: int, n: int) -> list[Action]:
    """The list for n >= 2p - 1 microbatches: warm-up, steady state, cool-down."""
    row = _Rank(p, rank)
    for _ in range(2 * (p - rank) - 1):
        row.forward(0)
    for _ in range(rank):
        row.forward(1)
        row.forward(0)
    for _ in range(p - rank):
        row.forward(1)
        _backward(row, 1)
    while row.done[FORWARD, 1] < row.done[FORWARD, 0] or row.done[FORWARD, 0] < n:
        if row.done[FORWARD, 0] < n:
            row.forward(0)
        _backward(row, 0)
        row.forward(1)
        _backward(row, 1)
    for _ in range(rank):
        row.add(BACKWARD_INPUT, 0)
        row.add(BACKWARD_INPUT, 1)
    for _ in range(p - rank):
        _backward(row, 0)
    for chunk in (1, 0):
        while row.done[BACKWARD_WEIGHT, chunk] < n:
            row.add(BACKWARD_WEIGHT, chunk)
    return row.actions


def _backward(row: _Rank, chunk: int) -> None:
    row.add(BACKWARD_INPUT, chunk)
    row.add(BACKWARD_WEIGHT, chunk)


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipeV with its paired forwards and backwards one after the other. Needs m >= 2p.

    It earns its place where a forward really overlaps a backward, as with expert parallelism.
    """
    check_counts(p, 2, m)
    if m < 2 * p:
        raise ScheduleError(
            f"dualpipe-v needs m >= 2p microbatches, got m={m} for p={p}; use m >= {2 * p} or zb-v"
        )
    return Schedule(m, v_place(p), tuple(tuple(_dualpipe_rank(p, r, m)) for r in range(p)))


def _dualpipe_rank(p: int, rank: int, m: int) -> list[Action]:
    """The eight phases of DualPipe on the half that is left."""
    row = _Rank(p, rank)
    after, upto = p - rank - 1, rank + 1
    for _ in range(2 * after):
        row.forward(0)
    for _ in range(upto):
        row.forward(0)
        row.forward(1)
    for _ in range(after):
        row.backward_input(1)
        row.weight()
        row.forward(1)
    for _ in range(m - 2 * p + upto):
        row.forward(0)
        row.backward(1)
        row.forward(1)
        row.backward(0)
    for _ in range(after):
        row.backward(1)
        row.forward(1)
        row.backward(0)
    for index in range(upto):
        split_1 = index > upto // 2 or (index == upto // 2 and rank % 2 == 1)
        split_0 = index >= upto // 2
        (row.backward_input if split_1 else row.backward)(1)
        (row.backward_input if split_0 else row.backward)(0)
    for _ in range(after):
        row.weight()
        row.backward_input(0)
    while row.pending:
        row.weight()
    return row.actions


def controllable(p: int, m: int, *, minimum: bool) -> Schedule:
    """V-min (about p/3 + 1 of memory) or V-half (p/2 + 1): a block of slots every six slots.

    Weight gradients take the free slots, first in, first out; then each rank runs its slots in
    order, as early as it can. V-half is not reordered afterwards, so its bubble is about
    1.8 (p - 1) at equal times where the published heuristic reaches 0.5 to 1.4.
    """
    check_counts(p, 2, m)
    ranks = tuple(tuple(_slotted_rank(p, rank, m, minimum=minimum)) for rank in range(p))
    return Schedule(m, v_place(p), ranks)


def _slots(p: int, r: int, *, minimum: bool) -> dict[tuple[str, int], int]:
    """Slot of microbatch 0 for (kind, chunk) on rank r."""
    if minimum:
        e = 2 if p % 3 == 0 else 0
        places = (r, 2 * p - r - 1, 2 * p + e + r, 4 * p + e - r - 1)
    else:
        e = 3 if p % 2 == 0 else 0
        places = (2 * r, 3 * p - r - 2, 3 * p + e + 2 * r - 1, 6 * p + e - r - 2)
    keys = ((FORWARD, 0), (FORWARD, 1), (BACKWARD_INPUT, 1), (BACKWARD_INPUT, 0))
    return dict(zip(keys, places, strict=True))


def _slotted_rank(p: int, rank: int, m: int, *, minimum: bool) -> list[Action]:
    slots = _slots(p, rank, minimum=minimum)
    at = {
        slot + 6 * mb: Action(kind, rank if chunk == 0 else 2 * p - 1 - rank, mb)
        for (kind, chunk), slot in slots.items()
        for mb in range(m)
    }
    actions: list[Action] = []
    pending: deque[Action] = deque()
    for slot in range(max(at) + 1):
        action = at.get(slot)
        if action is not None:
            actions.append(action)
            if action.kind == BACKWARD_INPUT:
                pending.append(action._replace(kind=BACKWARD_WEIGHT))
        elif pending:
            actions.append(pending.popleft())
    return [*actions, *pending]
