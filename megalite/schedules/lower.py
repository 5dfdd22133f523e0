"""From a schedule to the program each rank runs: adds transfers and gradient reductions.

All events are put in one total order by simulated completion, a transfer at the end of the
action that makes its data; each rank's program is that order restricted to it. Since every rank
follows the same total order, the first unfinished event can always proceed, even when sends and
receives block: no deadlock on any kind of communicator, and every channel sees its sends and
receives in the same order. `post_ahead` moves receives further ahead, for communicators on which
an early receive blocks nothing. Does not check (`check`) and moves no compute action.
"""

from __future__ import annotations

from megalite.errors import ScheduleError
from megalite.schedules.action import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVES,
    REDUCE,
    Action,
    Schedule,
    provides,
    receive_of,
    requires,
    send_carrying,
)
from megalite.schedules.simulate import Durations, simulate

# Sort key of an event: end, 0 for compute, 1 for a transfer, 2 for a reduction, stage, mb, kind.
_Key = tuple[float, int, int, int, str]


def lower(schedule: Schedule, durations: Durations | None = None) -> Schedule:
    """The program for a schedule of compute actions.

    Ordered by the given durations (default: equal stages, free hops). Adds SF/RF/SB/RB between
    stages on different ranks and REDUCE after each stage's last weight gradient. Raises
    ScheduleError on a deadlock or a duration <= 0.
    """
    times = Durations.even(schedule.p, schedule.v) if durations is None else durations
    if min(*times.forward, *times.backward_input, *times.backward_weight) <= 0:
        raise ScheduleError(f"lowering needs durations > 0 for every stage, got {times}")

    events: list[tuple[_Key, int, Action]] = []
    complete: dict[int, float] = {}  # stage -> end of its last weight gradient
    for rank, spans in enumerate(simulate(schedule, times).spans):
        for action, _, end in spans:
            events.append(((end, 0, action.stage, action.mb, action.kind), rank, action))
            for result in provides(action):
                events += _transfer(schedule, rank, result, end)
                if result.kind == BACKWARD_WEIGHT:
                    complete[result.stage] = end
    for stage, end in complete.items():
        events.append(((end, 2, stage, -1, REDUCE), schedule.place[stage], Action(REDUCE, stage)))

    # Sorted once for all ranks: the same total order everywhere is what excludes a deadlock.
    programs: list[list[Action]] = [[] for _ in schedule.ranks]
    for _, rank, action in sorted(events):
        programs[rank].append(action)
    return Schedule(schedule.m, schedule.place, tuple(tuple(actions) for actions in programs))


def _transfer(
    schedule: Schedule, rank: int, result: Action, end: float
) -> list[tuple[_Key, int, Action]]:
    """Send and receive events of a result; none if no other rank needs it."""
    kind, stage, mb = result
    if kind == FORWARD and stage + 1 < schedule.num_stages:
        peer = schedule.place[stage + 1]
    elif kind == BACKWARD_INPUT and stage > 0:
        peer = schedule.place[stage - 1]
    else:
        return []
    if peer == rank:
        return []
    send = send_carrying(result)
    key = (end, 1, stage, mb, send.kind)
    return [(key, rank, send), (key, peer, receive_of(send))]


def post_ahead(program: Schedule) -> Schedule:
    """The same program with every receive posted at least one waiting action earlier.

    Just before an action that waits for a message, the receive of the next waiting action is
    posted: its cost then falls into the wait, a send directly follows the action that made its
    data, and finds its receive posted. Sends do not move and every channel keeps its order, so a
    program stays free of deadlocks where a receive returns at once, even if a send blocks until
    its receive is posted (`blocking`).
    """
    ranks = (_posted_ahead(program, rank) for rank in range(program.p))
    return Schedule(program.m, program.place, tuple(ranks))


def _posted_ahead(program: Schedule, rank: int) -> tuple[Action, ...]:
    actions = program.ranks[rank]
    receives = [action for action in actions if action.kind in RECEIVES]
    number = {receive: index for index, receive in enumerate(receives)}
    # For each waiting action in order: how many receives must be posted for it to get its message.
    needed = [number[found] + 1 for action in actions if (found := _waits_for(program, action))]

    # Receives are only taken from the front of `receives`: every channel keeps its order.
    moved: list[Action] = []
    num_posted = 0
    needed_by_next = iter([*needed[1:], 0])
    for action in actions:
        num_due = 0
        if action.kind in RECEIVES:
            num_due = number[action] + 1
        elif _waits_for(program, action):
            num_due = next(needed_by_next)
        if num_due > num_posted:
            moved += receives[num_posted:num_due]
            num_posted = num_due
        if action.kind not in RECEIVES:
            moved.append(action)
    return tuple(moved)


def _waits_for(program: Schedule, action: Action) -> Action | None:
    """The receive whose message a compute action starts from, if it comes from another rank."""
    for need in requires(action, program.num_stages):
        if program.place[need.stage] != program.place[action.stage]:
            return receive_of(send_carrying(need))
    return None
