"""The pipeline schedule as a value: actions in order, one list per pipeline rank.

Pure data, hashable, with a text form that parses back. The same value is built (`builders`),
checked (`check`), timed (`simulate`), completed with transfers (`lower`) and executed (the
pipeline runtime). Knows no tensors, no processes and no durations.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from megalite.errors import ScheduleError
from megalite.wording import number_of

FORWARD: Final = "F"  # forward of one stage for one microbatch
BACKWARD_INPUT: Final = "B"  # gradient with respect to the stage's input
BACKWARD_WEIGHT: Final = "W"  # gradient with respect to the stage's weights
RECOMPUTE: Final = "R"  # the forward again, from the kept input, for the backward that follows
BACKWARD: Final = "BW"  # both in one; the input gradient exists only at the end
SEND_FORWARD: Final = "SF"  # this stage's output leaves for the next stage
RECV_FORWARD: Final = "RF"  # this stage's input arrives from the previous stage
SEND_BACKWARD: Final = "SB"  # this stage's input gradient leaves for the previous stage
RECV_BACKWARD: Final = "RB"  # this stage's output gradient arrives from the next stage
REDUCE: Final = "REDUCE"  # every gradient of the stage is complete

COMPUTE: Final = frozenset({FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, BACKWARD, RECOMPUTE})
SENDS: Final = frozenset({SEND_FORWARD, SEND_BACKWARD})
RECEIVES: Final = frozenset({RECV_FORWARD, RECV_BACKWARD})
ACTION_KINDS: Final = COMPUTE | SENDS | RECEIVES | {REDUCE}


class Action(NamedTuple):
    """One operation of a rank. `stage` always lives on that rank, for transfers too."""

    kind: str
    stage: int
    mb: int = -1  # microbatch; -1 for actions on a whole stage (REDUCE)

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}" + ("" if self.mb < 0 else f".{self.mb}")


def provides(action: Action) -> tuple[Action, ...]:
    """The results (as F, B, W actions) that exist once a compute action has ended."""
    if action.kind == BACKWARD:
        return action._replace(kind=BACKWARD_INPUT), action._replace(kind=BACKWARD_WEIGHT)
    return (action,) if action.kind in COMPUTE else ()


def requires(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The results (as F, B, W actions) that must exist before an action starts.

    A receive needs nothing here: it needs its send, which is another rank's action.
    """
    kind, stage, mb = action
    if kind == FORWARD:
        return (Action(FORWARD, stage - 1, mb),) if stage > 0 else ()
    if kind in (BACKWARD_INPUT, BACKWARD):
        own = (Action(FORWARD, stage, mb),)
        return (*own, Action(BACKWARD_INPUT, stage + 1, mb)) if stage + 1 < num_stages else own
    if kind in (BACKWARD_WEIGHT, SEND_BACKWARD):
        return (Action(BACKWARD_INPUT, stage, mb),)
    return (Action(FORWARD, stage, mb),) if kind in (SEND_FORWARD, RECOMPUTE) else ()


def send_carrying(result: Action) -> Action:
    """The send that takes a result (an F or B action) to the stage that needs it."""
    kinds = {FORWARD: SEND_FORWARD, BACKWARD_INPUT: SEND_BACKWARD}
    return result._replace(kind=kinds[result.kind])


def send_of(receive: Action) -> Action:
    """The send, on the neighbouring stage, whose message a receive takes."""
    if receive.kind == RECV_FORWARD:
        return Action(SEND_FORWARD, receive.stage - 1, receive.mb)
    return Action(SEND_BACKWARD, receive.stage + 1, receive.mb)


def receive_of(send: Action) -> Action:
    """The receive, on the neighbouring stage, that takes a send's message."""
    if send.kind == SEND_FORWARD:
        return Action(RECV_FORWARD, send.stage + 1, send.mb)
    return Action(RECV_BACKWARD, send.stage - 1, send.mb)


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank in one step, in order.

    `place` is the placement: `place[stage]` is the pipeline rank that holds the stage.
    `ranks[rank]` are the actions of a rank, `m` is the number of microbatches. With compute actions
    only it is a schedule; `lower` adds transfers and reductions and makes it a program. Raises
    ScheduleError unless every rank has equally many stages.
    """

    m: int
    place: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        counts = [self.place.count(rank) for rank in range(self.p)]
        if not self.place or sum(counts) != len(self.place) or len(set(counts)) != 1:
            raise ScheduleError(
                f"place={self.place} must give each of the {number_of(self.p, 'rank')} equally "
                "many stages"
            )

    @property
    def p(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ranks)

    @property
    def v(self) -> int:
        """Number of stages (model chunks) per rank."""
        return len(self.place) // len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.place)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages a pipeline rank holds; the position in it is the chunk index."""
        return tuple(stage for stage, owner in enumerate(self.place) if owner == rank)

    def keep(self, kinds: Iterable[str]) -> Schedule:
        """The same schedule with only the actions of these kinds."""
        wanted = frozenset(kinds)
        ranks = tuple(tuple(a for a in actions if a.kind in wanted) for actions in self.ranks)
        return Schedule(self.m, self.place, ranks)

    def edge_of(self, transfer: Action) -> tuple[int, int]:
        """The directed channel (sending rank, receiving rank) a send or receive uses."""
        send = transfer if transfer.kind in SENDS else send_of(transfer)
        return self.place[send.stage], self.place[receive_of(send).stage]

    def __str__(self) -> str:
        head = f"p={self.p} v={self.v} m={self.m} place={','.join(map(str, self.place))}"
        lines = [
            f"{rank}: {' '.join(map(str, actions))}".rstrip()
            for rank, actions in enumerate(self.ranks)
        ]
        return "\n".join([head, *lines]) + "\n"

    @property
    def digest(self) -> str:
        """sha256 of the text form, in hex: equal on ranks that run the same schedule."""
        return hashlib.sha256(str(self).encode()).hexdigest()


_HEAD = re.compile(r"p=(\d+) v=(\d+) m=(\d+) place=(\d+(?:,\d+)*)")
_ACTION = re.compile(r"([A-Z]+)(\d+)(?:\.(\d+))?")


def parse(text: str) -> Schedule:
    """Read the text form back. Raises ScheduleError naming the line and the word."""
    head, *lines = text.strip().splitlines() or [""]
    found = _HEAD.fullmatch(head.strip())
    if found is None:
        raise ScheduleError(f"line 1 is {head!r}; expected 'p=2 v=1 m=4 place=0,1'")
    p, v, m = (int(number) for number in found.groups()[:3])
    place = tuple(int(rank) for rank in found[4].split(","))
    if len(lines) != p or len(place) != p * v:
        raise ScheduleError(
            f"p={p} v={v} needs {number_of(p, 'line')} and {number_of(p * v, 'place')}; got "
            f"{len(lines)} and {len(place)}"
        )
    return Schedule(m, place, tuple(_parse_rank(rank, line) for rank, line in enumerate(lines)))


def _parse_rank(rank: int, line: str) -> tuple[Action, ...]:
    label, _, rest = line.partition(":")
    if label.strip() != str(rank):
        raise ScheduleError(f"line {rank + 2} starts with {label!r}; expected '{rank}:'")
    return tuple(_parse_action(rank, index, word) for index, word in enumerate(rest.split()))


def _parse_action(rank: int, index: int, word: str) -> Action:
    found = _ACTION.fullmatch(word)
    kind, stage, mb = found.groups() if found is not None else ("", "0", None)
    # Only REDUCE is an action on a whole stage; all others name a microbatch.
    if kind not in ACTION_KINDS or (mb is None) != (kind == REDUCE):
        raise ScheduleError(
            f"rank {rank}, index {index}: {word!r} is no action; expected KIND STAGE.MICROBATCH"
            f" like F0.3 with KIND one of {', '.join(sorted(ACTION_KINDS - {REDUCE}))}, or REDUCE0"
        )
    return Action(kind, int(stage), -1 if mb is None else int(mb))
