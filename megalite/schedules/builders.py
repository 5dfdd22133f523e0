"""Builders of schedules on the looped placement: the compute actions of each rank, in order.

Reading order: `family` (one generator for 1F1B, every interleaved schedule and the zero-bubble
kind), `breadth_first` (GPipe), `fuse` and `recompute` (which change any schedule). They work for
any number of ranks p, chunks per rank v and microbatches m, all >= 1; none has to divide another.
Stage s lives on rank s mod p as chunk s div p; `v_shape` builds on the other placement,
`catalogue` gives names to all. Transfers are not built here but derived (`lower`).
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
    RECOMPUTE,
    Action,
    Schedule,
)


def family(
    p: int, v: int, m: int, *, f: float = 1.0, lag: float = 0.0, group: int | None = None
) -> Schedule:
    """A schedule of the 1F1B family: one forward, one backward, with B and W as separate actions.

    `f` scales the warm-up (2 is Megatron's interleaved, v > 1 deadlocks above 2), `lag` how many
    weight gradients per rank position are held back, `group` how many microbatches go through a
    chunk together (default: about p, so that the groups are as equal as possible; Megatron's
    microbatch_group_size_per_vp_stage). f=1: 1F1B for v=1; f=2 and v > 1: interleaved 1F1B;
    lag=1: the zero-bubble kind. Raises ScheduleError for counts below 1 and negative f or lag.
    """
    check_counts(p, v, m)
    if f < 0 or lag < 0:
        raise ScheduleError(f"f={f:g}, lag={lag:g}: warm-up and lag must be >= 0")
    groups = _groups(p, v, m, group)
    order = _forward_order(v, groups)
    ranks = tuple(_family_rank(rank, p, v, groups, order, f, lag) for rank in range(p))
    return Schedule(m, looped_place(p, v), ranks)


def _family_rank(
    rank: int, p: int, v: int, groups: list[int], order: list[tuple[int, int]], f: float, lag: float
) -> tuple[Action, ...]:
    warm_up = _warm_up(rank, p, v, groups, f)
    most_deferred = math.ceil(lag * rank)
    actions: list[Action] = []
    forwards = iter(order)
    deferred: list[Action] = []
    # Backwards take the forwards' order with the chunks reversed: gradients come from the end.
    for done, (mb, chunk) in enumerate(order):
        due = warm_up + 1 if done == 0 else 1  # none once `forwards` is used up: the cool-down
        actions += [Action(FORWARD, c * p + rank, b) for b, c in islice(forwards, due)]
        backward = Action(BACKWARD_INPUT, (v - 1 - chunk) * p + rank, mb)
        actions.append(backward)
        deferred.append(backward._replace(kind=BACKWARD_WEIGHT))
        if len(deferred) > most_deferred:
            actions.append(deferred.pop(0))
    return (*actions, *deferred)


def breadth_first(p: int, v: int, m: int) -> Schedule:
    """All forwards chunk by chunk, then all backwards: GPipe for v=1, looped breadth-first above.

    Backwards take the microbatches in order, so that gradients add up as in one process.
    """
    check_counts(p, v, m)
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
        is_weight = action.kind == BACKWARD_WEIGHT
        if is_weight and fused[-1:] == [action._replace(kind=BACKWARD_INPUT)]:
            fused[-1] = action._replace(kind=BACKWARD)
        else:
            fused.append(action)
    return tuple(fused)


def recompute(schedule: Schedule) -> Schedule:
    """Run each forward again right before its backward, while the rank waits for the gradient."""
    return Schedule(schedule.m, schedule.place, tuple(_recompute_rank(a) for a in schedule.ranks))


def _recompute_rank(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    recomputed: list[Action] = []
    for action in actions:
        if action.kind in (BACKWARD, BACKWARD_INPUT):
            recomputed.append(action._replace(kind=RECOMPUTE))
        recomputed.append(action)
    return tuple(recomputed)


def forward_schedule(place: tuple[int, ...], m: int) -> Schedule:
    """Forwards of any number of microbatches through any placement, for evaluation.

    Stages count as equally long. Each rank runs the deepest of its stages that has an input: then
    few activations are held, and no rank waits for a result that it could have computed itself.
    """
    if m < 1:
        raise ScheduleError(f"m={m}: there must be at least one microbatch")
    ranks: list[list[Action]] = [[] for _ in range(max(place) + 1)]
    done = [0] * len(place)  # microbatches that each stage has finished
    while done[-1] < m:
        available = [m, *done]  # microbatches that stage s may take: those stage s - 1 has finished
        for rank, actions in enumerate(ranks):
            mine = [s for s, owner in enumerate(place) if owner == rank and done[s] < available[s]]
            if mine:
                stage = mine[-1]
                actions.append(Action(FORWARD, stage, done[stage]))
                done[stage] += 1
    return Schedule(m, place, tuple(map(tuple, ranks)))


def family_peak(
    rank: int,
    p: int,
    v: int,
    m: int,
    *,
    f: float = 1.0,
    lag: float = 0.0,
    group: int | None = None,
) -> int:
    """Most (stage, microbatch) pairs that a schedule of the family holds on a rank at once.

    A pair is held from the start of its F to the end of its W; it is 1/v of a rank's activations
    for one microbatch.
    """
    warm_up = _warm_up(rank, p, v, _groups(p, v, m, group), f)
    return min(m * v, warm_up + 1 + math.ceil(lag * rank))


def looped_place(p: int, v: int) -> tuple[int, ...]:
    """Rank of each of the p*v stages: stage s lives on rank s mod p."""
    return tuple(stage % p for stage in range(p * v))


def _warm_up(rank: int, p: int, v: int, groups: list[int], f: float) -> int:
    """Forwards that a rank runs before the forward that its first backward follows."""
    return min(sum(groups) * v, math.ceil(f * (p - 1 - rank)) + (v - 1) * groups[0])


def _groups(p: int, v: int, m: int, group: int | None) -> list[int]:
    """Sizes of the groups of microbatches that go through a chunk together, larger ones first."""
    if group is not None:
        if group < 1:
            raise ScheduleError(f"group={group}: a group has at least one microbatch")
        full, rest = divmod(m, group)
        sizes = [group] * full
        return [*sizes, rest] if rest else sizes
    count = max(1, m // p) if v > 1 else 1
    smaller, num_larger = divmod(m, count)
    return [smaller + 1] * num_larger + [smaller] * (count - num_larger)


def _forward_order(v: int, groups: list[int]) -> list[tuple[int, int]]:
    """Every (microbatch, chunk) in the order in which a rank runs its forwards."""
    order = []
    first = 0
    for size in groups:
        order += [(mb, chunk) for chunk in range(v) for mb in range(first, first + size)]
        first += size
    return order


def check_counts(p: int, v: int, m: int) -> None:
    """Raise ScheduleError unless there are ranks, chunks and microbatches."""
    if min(p, v, m) < 1:
        raise ScheduleError(f"p={p}, v={v}, m={m}: ranks, chunks and microbatches must be >= 1")
