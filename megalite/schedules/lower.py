"""From a schedule to the program each rank runs: adds transfers and gradient reductions.

All events are put in one total order by simulated completion, a transfer at the end of the
action that makes its data; each rank's program is that order restricted to it. Since every rank
follows the same total order, the first unfinished event can always proceed, even when sends and
receives block: no deadlock on any kind of communicator, and every channel sees its sends and
receives in the same order. Does not check the schedule (`check`) and moves no compute action.
"""

from __future__ import annotations

from megalite.errors import ScheduleError
from megalite.schedules.action import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    REDUCE,
    SEND_BACKWARD,
    SEND_FORWARD,
    Action,
    Schedule,
    provides,
    receive_of,
)
from megalite.schedules.simulate import Durations, simulate

_Key = tuple[float, int, int, int, str]  # end, class (compute, transfer, reduce), stage, mb, kind


def lower(schedule: Schedule, durations: Durations | None = None) -> Schedule:
    """The program for a schedule of compute actions, ordered by the given durations (default:
    equal stages, free hops). Adds SF/RF/SB/RB between stages on different ranks and REDUCE after
    each stage's last weight gradient. Raises ScheduleError on a deadlock or a duration <= 0.
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
    programs: list[list[Action]] = [[] for _ in schedule.ranks]
    for _, rank, action in sorted(events):
        programs[rank].append(action)
    return Schedule(schedule.m, schedule.place, tuple(tuple(actions) for actions in programs))


def _transfer(
    schedule: Schedule, rank: int, result: Action, end: float
) -> list[tuple[_Key, int, Action]]:
    """Send and receive events of a result, none when nobody else needs it."""
    kind, stage, mb = result
    if kind == FORWARD and stage + 1 < schedule.num_stages:
        send, peer = Action(SEND_FORWARD, stage, mb), schedule.place[stage + 1]
    elif kind == BACKWARD_INPUT and stage > 0:
        send, peer = Action(SEND_BACKWARD, stage, mb), schedule.place[stage - 1]
    else:
        return []
    if peer == rank:
        return []
    key = (end, 1, stage, mb, send.kind)
    return [(key, rank, send), (key, peer, receive_of(send))]
