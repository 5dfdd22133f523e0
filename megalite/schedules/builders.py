"""Builders of pipeline schedules: who computes what, in which order.

Reading order: `build` (the names a user can ask for), `family` (one generator for 1F1B and every
interleaved schedule), `breadth_first` (GPipe). They work for any number of microbatches m >= 1
on any number of ranks p; nothing has to divide anything. Stages are placed in a loop: stage s
lives on rank s mod p as chunk s div p. Transfers are not built here but derived (`lower`).
"""

from __future__ import annotations

import math
from itertools import islice

from megalite.errors import ScheduleError
from megalite.schedules.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
)

NAMES = ("gpipe", "1f1b", "interleaved")


def build(name: str, p: int, v: int, m: int) -> Schedule:
    """The schedule a user names, with fused backwards: compute actions for p ranks, v chunks each.

    Raises ScheduleError for an unknown name and for a v that the name does not go with.
    """
    if name == "gpipe":
        return breadth_first(p, v, m)
    if name == "1f1b":
        if v != 1:
            raise ScheduleError(f"1f1b has one chunk per rank, got v={v}; use interleaved or v=1")
        return fuse(family(p, 1, m, f=1.0))
    if name == "interleaved":
        if v < 2:
            raise ScheduleError(f"interleaved needs v >= 2 chunks per rank, got v={v}; use 1f1b")
        return fuse(family(p, v, m, f=2.0))
    raise ScheduleError(f"schedule {name!r} is unknown; use one of {', '.join(NAMES)}")


def family(p: int, v: int, m: int, *, f: float = 1.0, lag: float = 0.0) -> Schedule:
    """One forward, one backward, with split B and W.

    `f` scales the warm-up (2 is Megatron's interleaved, v > 1 deadlocks above 2), `lag` how many
    weight gradients per rank position are held back. f=1: 1F1B for v=1, f=2 and v > 1:
    interleaved 1F1B, lag=1: the zero-bubble kind. Raises ScheduleError for counts below 1.
    """
    _check_counts(p, v, m)
    table = _table(p, v, m)
    ranks = tuple(_family_rank(rank, p, v, m, table, f, lag) for rank in range(p))
    return Schedule(m, looped_place(p, v), ranks)


def _family_rank(
    rank: int, p: int, v: int, m: int, table: list[tuple[int, int]], f: float, lag: float
) -> tuple[Action, ...]:
    warm = _warm_up(rank, p, v, m, f)
    hold = math.ceil(lag * rank)
    actions: list[Action] = []
    forwards = iter(table)
    pending: list[Action] = []
    for done, (mb, chunk) in enumerate(table):
        due = warm + 1 if done == 0 else 1
        actions += [Action(FORWARD, c * p + rank, b) for b, c in islice(forwards, due)]
        backward = Action(BACKWARD_INPUT, (v - 1 - chunk) * p + rank, mb)
        actions.append(backward)
        pending.append(backward._replace(kind=BACKWARD_WEIGHT))
        if len(pending) > hold:
            actions.append(pending.pop(0))
    return (*actions, *pending)


def breadth_first(p: int, v: int, m: int) -> Schedule:
    """All forwards chunk by chunk, then all backwards: GPipe for v=1, looped breadth-first above.

    Backwards take the microbatches in order, so that gradients add up as in one process.
    """
    _check_counts(p, v, m)
    ranks = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        forwards = [Action(FORWARD, stage, mb) for stage in stages for mb in range(m)]
        backwards = [Action(BACKWARD, stage, mb) for stage in reversed(stages) for mb in range(m)]
        ranks.append((*forwards, *backwards))
    return Schedule(m, looped_place(p, v), tuple(ranks))


def fuse(schedule: Schedule) -> Schedule:
    """Join each B that is directly followed by its own W into one fused BW."""
    return Schedule(schedule.m, schedule.place, tuple(_fuse_rank(a) for a in schedule.ranks))


def _fuse_rank(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    fused: list[Action] = []
    for action in actions:
        if action.kind == BACKWARD_WEIGHT and fused[-1:] == [action._replace(kind=BACKWARD_INPUT)]:
            fused[-1] = action._replace(kind=BACKWARD)
        else:
            fused.append(action)
    return tuple(fused)


def forward_only(schedule: Schedule) -> Schedule:
    """The same schedule without anything but forwards, for evaluation."""
    return schedule.keep([FORWARD])


def forward_schedule(p: int, v: int, m: int) -> Schedule:
    """Forwards of any number of microbatches through the looped placement, for evaluation."""
    return forward_only(family(p, v, m))


def family_peak(rank: int, p: int, v: int, m: int, *, f: float = 1.0, lag: float = 0.0) -> int:
    """Most (stage, microbatch) pairs a family schedule holds on a rank, from start of F to end of
    W. One of them is 1/v of a rank's activations for one microbatch.
    """
    return min(m * v, _warm_up(rank, p, v, m, f) + 1 + math.ceil(lag * rank))


def looped_place(p: int, v: int) -> tuple[int, ...]:
    """Rank of each of the p*v stages: stage s lives on rank s mod p."""
    return tuple(stage % p for stage in range(p * v))


def _warm_up(rank: int, p: int, v: int, m: int, f: float) -> int:
    """Forwards a rank has done before the forward that its first backward follows."""
    return min(m * v, math.ceil(f * (p - 1 - rank)) + (v - 1) * _groups(p, v, m)[0])


def _groups(p: int, v: int, m: int) -> list[int]:
    """Sizes of the groups of microbatches that go through a chunk together, larger ones first."""
    count = max(1, m // p) if v > 1 else 1
    return [m // count + (index < m % count) for index in range(count)]


def _table(p: int, v: int, m: int) -> list[tuple[int, int]]:
    """Every (microbatch, chunk) in the order in which a rank runs its forwards."""
    table = []
    first = 0
    for size in _groups(p, v, m):
        table += [(mb, chunk) for chunk in range(v) for mb in range(first, first + size)]
        first += size
    return table


def _check_counts(p: int, v: int, m: int) -> None:
    if min(p, v, m) < 1:
        raise ScheduleError(f"p={p}, v={v}, m={m}: ranks, chunks and microbatches must be >= 1")
