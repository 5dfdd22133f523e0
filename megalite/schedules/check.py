"""Proves a schedule or a program right before anything runs, or raises ScheduleError.

`check_schedule` takes compute actions only, `check_program` what `lower` returns, `check_posted`
what `post_ahead` makes of that. Every ScheduleError names rank, index and action. Repairs nothing
and does not judge speed.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalite.errors import ScheduleError
from megalite.schedules.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    RECEIVES,
    RECOMPUTE,
    RECV_BACKWARD,
    RECV_FORWARD,
    REDUCE,
    SEND_BACKWARD,
    SEND_FORWARD,
    SENDS,
    Action,
    Schedule,
    provides,
    requires,
    send_carrying,
    send_of,
)
from megalite.schedules.blocking import require_finish
from megalite.schedules.simulate import Durations, simulate
from megalite.wording import number_of


def check_schedule(schedule: Schedule, *, forward_only: bool = False) -> None:
    """Raise ScheduleError unless a schedule of compute actions is complete and can run.

    Every stage must compute every microbatch exactly once, on its own rank, after its inputs and
    with gradients in microbatch order; and the ranks must not deadlock.
    """
    _check_kinds(schedule, COMPUTE)
    _check_compute(schedule, _results(schedule, forward_only))


def check_program(program: Schedule, *, forward_only: bool = False) -> None:
    """Raise ScheduleError unless a program is complete and finishes, whatever its transfers block.

    The compute actions must pass `check_schedule`; every needed transfer must exist once, between
    the actions that make and use its data, and in the same order on both ends of its channel; and
    every stage must be reduced once, after its last gradient.
    """
    _check_kinds(program, COMPUTE | SENDS | RECEIVES | {REDUCE})
    expected = [*_results(program, forward_only), *_transfers(program, forward_only)]
    if not forward_only:
        expected += [Action(REDUCE, stage) for stage in range(program.num_stages)]
    _check_compute(program, expected)
    _check_arrivals(program)
    _check_reduce(program)
    _check_channels(program)
    require_finish(program, receives_block=True)


def check_posted(program: Schedule) -> None:
    """Raise ScheduleError unless a checked program is still right after `post_ahead`.

    Its receives were moved: every message must still arrive before its use, in the order of its
    channel, and the program must finish where sends block until received.
    """
    _check_arrivals(program)
    _check_channels(program)
    require_finish(program, receives_block=False)


def _check_compute(schedule: Schedule, expected: list[Action]) -> None:
    _check_complete(schedule, expected)
    _check_local_order(schedule)
    _check_gradient_order(schedule)
    simulate(schedule, Durations.even(schedule.p, schedule.v))


def _error(rank: int, index: int, action: Action, what: str) -> ScheduleError:
    error = ScheduleError(f"rank {rank}, index {index}, action {action}: {what}")
    error.position = (rank, index)
    return error


def _walk(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            yield rank, index, action


def _check_kinds(schedule: Schedule, kinds: frozenset[str]) -> None:
    """Kinds are known, stages and microbatches exist, and each stage's rank runs its actions."""
    for rank, index, action in _walk(schedule):
        if action.kind not in kinds:
            allowed = ", ".join(sorted(kinds))
            raise _error(rank, index, action, f"kind {action.kind!r} is not one of {allowed}")
        if not 0 <= action.stage < schedule.num_stages:
            raise _error(
                rank, index, action, f"the schedule has {number_of(schedule.num_stages, 'stage')}"
            )
        in_range = action.mb == -1 if action.kind == REDUCE else 0 <= action.mb < schedule.m
        if not in_range:
            raise _error(rank, index, action, f"microbatch is not in 0..{schedule.m - 1}")
        if schedule.place[action.stage] != rank:
            owner = schedule.place[action.stage]
            raise _error(rank, index, action, f"stage {action.stage} lives on rank {owner}")


def _results(schedule: Schedule, forward_only: bool) -> list[Action]:
    """Every result that a step must make."""
    kinds = [FORWARD] if forward_only else [FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT]
    pairs = [(kind, stage) for kind in kinds for stage in range(schedule.num_stages)]
    if not forward_only:
        pairs += [(RECOMPUTE, stage) for stage in sorted(_recomputed_stages(schedule))]
    return [Action(kind, stage, mb) for kind, stage in pairs for mb in range(schedule.m)]


def _recomputed_stages(schedule: Schedule) -> set[int]:
    """Stages that recompute a microbatch: then they must recompute all of them."""
    return {action.stage for _, _, action in _walk(schedule) if action.kind == RECOMPUTE}


def _transfers(schedule: Schedule, forward_only: bool) -> list[Action]:
    """Every send and receive of a step: one of each where neighbouring stages are on two ranks."""
    transfers = []
    for stage in range(1, schedule.num_stages):
        if schedule.place[stage - 1] == schedule.place[stage]:
            continue
        for mb in range(schedule.m):
            transfers += [Action(SEND_FORWARD, stage - 1, mb), Action(RECV_FORWARD, stage, mb)]
            if not forward_only:
                transfers += [
                    Action(SEND_BACKWARD, stage, mb),
                    Action(RECV_BACKWARD, stage - 1, mb),
                ]
    return transfers


def _check_complete(schedule: Schedule, expected: list[Action]) -> None:
    """Every expected result once, and no other."""
    wanted = set(expected)
    seen: dict[Action, int] = {}
    for rank, index, action in _walk(schedule):
        for result in provides(action) or (action,):
            if result in seen:
                raise _error(rank, index, action, f"{result} was already done at {seen[result]}")
            if result not in wanted:
                raise _error(rank, index, action, "nothing in this step calls for it")
            seen[result] = index
    for result in expected:
        if result not in seen:
            rank = schedule.place[result.stage]
            raise _error(rank, len(schedule.ranks[rank]), result, "it is missing from the list")


def _check_local_order(schedule: Schedule) -> None:
    """Results that an action needs from its own rank come earlier in the rank's list."""
    recomputed = _recomputed_stages(schedule)
    for rank, actions in enumerate(schedule.ranks):
        done: set[Action] = set()
        for index, action in enumerate(actions):
            needs = requires(action, schedule.num_stages)
            if action.stage in recomputed and action.kind in (BACKWARD_INPUT, BACKWARD):
                needs = (*needs, action._replace(kind=RECOMPUTE))
            for need in needs:
                if schedule.place[need.stage] == rank and need not in done:
                    raise _error(rank, index, action, f"{need} must come before it")
            done.update(provides(action))


def _check_gradient_order(schedule: Schedule) -> None:
    """A stage's gradients are added in microbatch order: the same bits as in one process."""
    latest: dict[tuple[str, int], int] = {}
    for rank, index, action in _walk(schedule):
        for kind, stage, mb in provides(action):
            if kind != FORWARD and mb < latest.get((kind, stage), -1):
                last = latest[kind, stage]
                raise _error(rank, index, action, f"comes after microbatch {last} of its stage")
            latest[kind, stage] = mb


def _check_arrivals(program: Schedule) -> None:
    """A result that comes from another rank is received before it is used."""
    for rank, actions in enumerate(program.ranks):
        received: set[Action] = set()
        for index, action in enumerate(actions):
            if action.kind in RECEIVES:
                received.add(send_of(action))
            if action.kind not in COMPUTE:
                continue
            for need in requires(action, program.num_stages):
                remote = program.place[need.stage] != rank
                if remote and send_carrying(need) not in received:
                    raise _error(rank, index, action, f"{need} must be received before it")


def _check_reduce(program: Schedule) -> None:
    """A stage is reduced after its last gradient."""
    reduced: set[int] = set()
    for rank, index, action in _walk(program):
        if action.kind == REDUCE:
            reduced.add(action.stage)
        elif action.stage in reduced and action.kind in COMPUTE:
            raise _error(rank, index, action, f"comes after REDUCE{action.stage}")


def _check_channels(program: Schedule) -> None:
    """On every directed channel the receives come in the order of the sends."""
    sends: dict[tuple[int, int], list[Action]] = {}
    for _, _, action in _walk(program):
        if action.kind in SENDS:
            sends.setdefault(program.edge_of(action), []).append(action)
    taken: dict[tuple[int, int], int] = {}
    for rank, index, action in _walk(program):
        if action.kind in RECEIVES:
            edge = program.edge_of(action)
            position = taken.get(edge, 0)
            taken[edge] = position + 1
            if sends[edge][position] != send_of(action):
                what = f"channel {edge[0]}->{edge[1]} delivers {sends[edge][position]} here"
                raise _error(rank, index, action, what)
