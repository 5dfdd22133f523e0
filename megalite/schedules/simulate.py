"""The time line of a schedule for given durations.

Each rank runs its actions in order; an action starts when the rank is free and its inputs have
arrived: a hop after they were made, if another rank made them. Transfers overlap with compute and
do not queue behind each other. The result is the time of a schedule that nothing else disturbs;
links, kernels and the optimizer are not modelled.

Reading order: `Durations`, `Timeline`, `simulate`. Inside, an action is a few numbers (duration,
result waited for, result made), so that a long schedule takes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from megalite.errors import ScheduleError
from megalite.schedules.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    RECOMPUTE,
    Action,
    Schedule,
    provides,
    requires,
)

# In place of a result's number: none is waited for, or one that no earlier action makes.
_NOTHING, _NEVER = -1, -2


@dataclass(frozen=True)
class Durations:
    """Times of each stage's actions on one microbatch, and of a hop between ranks, in one unit.

    recompute: empty stands for the forward's times.
    """

    forward: tuple[float, ...]  # per stage
    backward_input: tuple[float, ...]  # per stage
    backward_weight: tuple[float, ...]  # per stage
    hop: float = 0.0
    recompute: tuple[float, ...] = ()  # per stage

    @classmethod
    def even(
        cls, p: int, v: int, *, f: float = 1.0, b: float = 1.0, w: float = 1.0, hop: float = 0.0
    ) -> Durations:
        """Times of equal stages; f, b, w are those of a whole rank: each chunk takes 1/v."""
        stages = p * v
        return cls((f / v,) * stages, (b / v,) * stages, (w / v,) * stages, hop)

    def of_kind(self, kind: str) -> Sequence[float]:
        """The durations of a kind of compute action, one per stage."""
        if kind == BACKWARD:
            pairs = zip(self.backward_input, self.backward_weight, strict=True)
            return [b + w for b, w in pairs]
        per_stage = {
            FORWARD: self.forward,
            BACKWARD_INPUT: self.backward_input,
            BACKWARD_WEIGHT: self.backward_weight,
            RECOMPUTE: self.recompute or self.forward,
        }
        return per_stage[kind]


class TimedAction(NamedTuple):
    """One action with its start and end on the time line."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Start and end of each rank's compute actions, in program order.

    starts[rank][i], ends[rank][i] belong to programs[rank][i]; the step begins at 0.
    """

    programs: tuple[tuple[Action, ...], ...]
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]

    @cached_property
    def spans(self) -> tuple[tuple[TimedAction, ...], ...]:
        """The actions with their times: `spans[rank]` in program order."""
        rows = zip(self.programs, self.starts, self.ends, strict=True)
        return tuple(tuple(map(TimedAction, *row)) for row in rows)

    @property
    def makespan(self) -> float:
        """End of the last action of any rank; the step starts at 0."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(
            sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def bubble(self) -> float:
        """Mean time that a rank idles in a step, which ends for all ranks together."""
        return self.makespan - sum(self.busy) / len(self.programs)

    @property
    def bubble_fraction(self) -> float:
        """The bubble as a share of the step."""
        return self.bubble / self.makespan if self.makespan > 0 else 0.0

    @property
    def span_bubble(self) -> float:
        """Most that a rank idles between its own first and last action.

        The cost of a step where steps overlap: the figure that papers on zero-bubble schedules
        report.
        """
        rows = zip(self.starts, self.ends, self.busy, strict=True)
        return max((e[-1] - s[0] - busy for s, e, busy in rows if s), default=0.0)


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Start and end of every compute action; transfers and reductions are left out.

    Raises ScheduleError, with a line per stuck rank, when the ranks wait for each other forever.
    """
    programs = [tuple(a for a in actions if a.kind in COMPUTE) for actions in schedule.ranks]
    encoder = _Encoder(schedule, durations)
    rows = [encoder.encode(actions) for actions in programs]
    starts, ends, waiting = _run(rows, encoder.num_results)
    if waiting:
        raise ScheduleError(_deadlock(schedule, programs, ends, waiting))
    return Timeline(tuple(programs), tuple(starts), tuple(ends))


# An action: its duration, the result it needs, the hop before that arrives, the result it makes.
# Results are numbers.
_Row = tuple[float, int, float, int]


class _Encoder:
    """Encodes actions as numbers.

    Results that other actions can wait for are numbered: F of every (stage, mb), then B of every
    (stage, mb).
    """

    def __init__(self, schedule: Schedule, durations: Durations) -> None:
        stages, m = schedule.num_stages, schedule.m
        self.m, self.last = m, stages - 1
        self.num_results = 2 * stages * m
        self.backward_base = stages * m
        cross = [0.0 if a == b else durations.hop for a, b in pairwise(schedule.place)]
        self.before = {FORWARD: [0.0, *cross], BACKWARD: [*cross, 0.0]}
        self.durations = {kind: durations.of_kind(kind) for kind in COMPUTE}

    def encode(self, actions: Sequence[Action]) -> list[_Row]:
        """A rank's actions as numbers.

        A result that an action needs from its own rank must come before it in the list, so it is
        checked here: `_NEVER` marks an action that would wait forever.
        """
        m, last, base = self.m, self.last, self.backward_base
        forwards, backwards = bytearray(base), bytearray(base)
        before_f, before_b = self.before[FORWARD], self.before[BACKWARD]
        durations = self.durations

        # `forwards` and `backwards` mark the results that the rank has made so far.
        rows: list[_Row] = []
        for kind, stage, mb in actions:
            at = stage * m + mb
            duration = durations[kind][stage]
            if kind == FORWARD:
                forwards[at] = 1
                need = at - m if stage else _NOTHING
                rows.append((duration, need, before_f[stage], at))
            elif kind in (BACKWARD, BACKWARD_INPUT):
                backwards[at] = 1
                need = base + at + m if stage < last else _NOTHING
                need = need if forwards[at] else _NEVER
                rows.append((duration, need, before_b[stage], base + at))
            else:
                made = backwards[at] if kind == BACKWARD_WEIGHT else forwards[at]
                rows.append((duration, _NOTHING if made else _NEVER, 0.0, _NOTHING))
        return rows


def _run(
    rows: list[list[_Row]], num_results: int
) -> tuple[list[list[float]], list[list[float]], dict[int, int]]:
    """Starts and ends per rank, and the ranks that wait forever: rank -> index of its action."""
    made = [-1.0] * (num_results + 1)  # time of each result; the extra last one is never made
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    free = [0.0] * len(rows)
    waiter: dict[int, int] = {}  # result -> the one rank that waits for it
    stuck: dict[int, int] = {}

    # Each rank runs as far as it can; a result wakes the rank that waits for it. The order in which
    # ranks are taken changes no time, since a start depends on results and the own rank only.
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        now, rank_starts, rank_ends, row = free[rank], starts[rank], ends[rank], rows[rank]
        stuck.pop(rank, None)
        for index in range(len(rank_starts), len(row)):
            duration, need, hop, makes = row[index]
            if need != _NOTHING:
                ready_at = made[need] if need >= 0 else -1.0
                if ready_at < 0.0:
                    waiter[need], stuck[rank] = rank, index
                    break
                if ready_at + hop > now:
                    now = ready_at + hop
            rank_starts.append(now)
            now += duration
            rank_ends.append(now)
            if makes >= 0:
                made[makes] = now
                if makes in waiter:
                    ready.append(waiter.pop(makes))
        free[rank] = now
    return starts, ends, stuck


def _deadlock(
    schedule: Schedule,
    programs: list[tuple[Action, ...]],
    ends: list[list[float]],
    waiting: dict[int, int],
) -> str:
    done: set[Action] = set()
    for actions, rank_ends in zip(programs, ends, strict=True):
        for action in actions[: len(rank_ends)]:
            done.update(provides(action))
    lines = ["the schedule deadlocks:"]
    for rank, position in sorted(waiting.items()):
        action = programs[rank][position]
        missing = next(n for n in requires(action, schedule.num_stages) if n not in done)
        compute = [i for i, a in enumerate(schedule.ranks[rank]) if a.kind in COMPUTE]
        where = f"rank {rank}, index {compute[position]}, action {action}"
        lines.append(f"{where}: waits for {missing}")
    return "\n".join(lines)
