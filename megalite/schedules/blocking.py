"""Runs a program where transfers block, to see whether it finishes. Nothing is timed: `simulate`.

A send returns when its receive has begun, a receive when its send has. A program that finishes so
finishes on any communicator, whichever transfers wait for which on it: one that waits for less can
do the same transfers in the same order. Where receives are posted ahead (`lower.post_ahead`) they
return at once; such a program finishes where transfers wait for others of their channel alone.
"""

from __future__ import annotations

from megalite.errors import ScheduleError
from megalite.schedules.action import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Schedule,
    provides,
    receive_of,
    requires,
    send_carrying,
    send_of,
)


def require_finish(program: Schedule, *, receives_block: bool) -> None:
    """Run a checked program until nothing moves.

    Raises ScheduleError with the position of each stuck rank, if any is left.
    """
    at = [0] * program.p
    done: set[Action] = set()  # results, and transfers that have begun
    ready = list(range(program.p))
    while ready:
        rank = ready.pop()
        actions = program.ranks[rank]
        while at[rank] < len(actions):
            action = actions[at[rank]]

            # A transfer that begins may free its peer, whatever that waits for.
            if action.kind in SENDS | RECEIVES and action not in done:
                done.add(action)
                ready += [end for end in program.edge_of(action) if end != rank]
            waits_for = _waits_for(program, rank, action, receives_block)
            if not waits_for <= done:
                break
            done.update(provides(action))
            at[rank] += 1

    stuck = [
        f"rank {rank}, index {index}, action {program.ranks[rank][index]}: cannot go on"
        for rank, index in enumerate(at)
        if index < len(program.ranks[rank])
    ]
    if stuck:
        where = "sends and receives block" if receives_block else "sends block until received"
        raise ScheduleError("\n".join([f"the program hangs where {where}:", *stuck]))


def _waits_for(program: Schedule, rank: int, action: Action, receives_block: bool) -> set[Action]:
    """The results and begun transfers without which an action does not return."""
    if action.kind in SENDS:
        return {receive_of(action)}
    if action.kind in RECEIVES:
        return {send_of(action)} if receives_block else set()
    if action.kind not in COMPUTE:
        return set()
    needs = requires(action, program.num_stages)
    return {need if program.place[need.stage] == rank else send_carrying(need) for need in needs}
