"""Models of communicators: a program is run on one to see whether it finishes.

Communicators differ in which transfers wait for which: each of the models below has its own
queues, and a program must finish on all of them. Nothing is timed; for times see `simulate`.

| model    | stands for                                        | waits behind                      |
| -------- | ------------------------------------------------- | --------------------------------- |
| async    | the ideal                                         | nothing                           |
| dir      | one communicator per directed edge                | the same edge                     |
| pair     | one communicator per pair of ranks                | both edges of the pair            |
| rank     | one communicator for all                          | all transfers of the rank         |
| blocking | sends and receives that return when they are done | everything the rank does          |

Where receives are posted ahead (`lower.post_ahead`), a receive that blocked would hang by itself,
so "blocking" does not apply; "rendezvous" stands for that case: sends that return when their
receive has been posted, receives that return at once, on one communicator per directed edge.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Final

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

COMMUNICATORS: Final = ("async", "dir", "pair", "rank", "blocking")
# Those on which a receive that is posted early delays no transfer of another edge.
POSTED_COMMUNICATORS: Final = ("async", "dir", "rendezvous")

_BLOCKING: Final = {"blocking": SENDS | RECEIVES, "rendezvous": SENDS}


def run_on(communicator: str, program: Schedule) -> None:
    """Run a program on a model of a communicator until nothing moves.

    Raises ScheduleError with the position of each stuck rank, if any is left.
    """
    state = _State(program, communicator)
    ready = list(range(program.p))
    while ready:
        ready += state.advance(ready.pop())
    stuck = state.stuck()
    if stuck:
        raise ScheduleError(
            "\n".join([f"the program hangs on communicator model {communicator}:", *stuck])
        )


class _State:
    """The position of every rank, the results that exist, and the transfers in flight."""

    def __init__(self, program: Schedule, communicator: str) -> None:
        self.program = program
        self.communicator = communicator
        self.blocking = _BLOCKING.get(communicator, frozenset())  # kinds that return when done
        self.at = [0] * program.p
        self.issued = [0] * program.p  # actions whose transfer, if they are one, has been issued
        self.done: set[Action] = set()  # results, and sends whose message has been taken
        self.queues: dict[tuple[int, Hashable], deque[Action]] = {}  # messages, named by the send

    def advance(self, rank: int) -> set[int]:
        """Run one rank as far as it gets; returns the ranks that may be able to continue now."""
        woken: set[int] = set()
        actions = self.program.ranks[rank]
        while self.at[rank] < len(actions):
            action = actions[self.at[rank]]
            if action.kind in COMPUTE and not self._inputs_ready(rank, action):
                break
            if action.kind in SENDS | RECEIVES and self.issued[rank] == self.at[rank]:
                self.issued[rank] += 1
                woken |= self._issue(rank, action)
            if action.kind in self.blocking and self._in_flight(action):
                break
            self.done.update(provides(action))
            self.at[rank] += 1
            self.issued[rank] = self.at[rank]
        return woken - {rank}

    def _inputs_ready(self, rank: int, action: Action) -> bool:
        place = self.program.place
        for need in requires(action, self.program.num_stages):
            arrived = need if place[need.stage] == rank else send_carrying(need)
            if arrived not in self.done:
                return False
        return True

    def _in_flight(self, action: Action) -> bool:
        if action.kind not in SENDS | RECEIVES:
            return False
        return (action if action.kind in SENDS else send_of(action)) not in self.done

    def _lane(self, message: Action) -> Hashable:
        """The queue of its rank that a transfer joins; None is the one queue of all transfers."""
        edge = self.program.edge_of(message)
        lanes: dict[str, Hashable] = {
            "async": message,
            "dir": edge,
            "rendezvous": edge,
            "pair": frozenset(edge),
        }
        return lanes.get(self.communicator)

    def _issue(self, rank: int, action: Action) -> set[int]:
        message = action if action.kind in SENDS else send_of(action)
        lane = self._lane(message)
        self.queues.setdefault((rank, lane), deque()).append(message)
        return self._deliver(rank, lane)

    def _deliver(self, rank: int, lane: Hashable) -> set[int]:
        """Deliver messages that are first in the queues of both of their ranks."""
        woken: set[int] = set()
        to_look_at = [(rank, lane)]
        while to_look_at:
            queue = self.queues.get(to_look_at[-1])
            if not queue:
                to_look_at.pop()
                continue
            message = queue[0]
            ends = [(end, self._lane(message)) for end in self.program.edge_of(message)]
            if any(not self.queues.get(end) or self.queues[end][0] != message for end in ends):
                to_look_at.pop()
                continue
            for end in ends:
                self.queues[end].popleft()
            self.done.add(message)
            woken.update(end for end, _ in ends)
            to_look_at += ends  # the next message of each may have become first at both ends
        return woken

    def stuck(self) -> list[str]:
        """One line per rank that has not finished, and per queue that still holds a transfer."""
        lines = []
        for rank, actions in enumerate(self.program.ranks):
            if self.at[rank] < len(actions):
                index = self.at[rank]
                lines.append(f"rank {rank}, index {index}, action {actions[index]}: cannot go on")
        for (rank, _), queue in self.queues.items():
            if queue:
                send = queue[0]
                own = send if self.program.place[send.stage] == rank else receive_of(send)
                index = self.program.ranks[rank].index(own)
                lines.append(f"rank {rank}, index {index}, action {own}: its peer never gets there")
        return lines
