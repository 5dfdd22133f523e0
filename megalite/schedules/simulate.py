"""The time line of a schedule for given durations, and the memory it holds.

Each rank runs its actions in order; an action starts when the rank is free and its inputs have
arrived, a hop after they were made when they come from another rank. Transfers overlap with
compute and do not queue behind each other. Says how long a schedule takes if nothing else
disturbs it; does not model links, kernels or the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megalite.errors import ScheduleError
from megalite.schedules.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    Action,
    Schedule,
    provides,
    requires,
)


@dataclass(frozen=True)
class Durations:
    """How long each stage computes for one microbatch, and one hop; any unit, one for all."""

    forward: tuple[float, ...]  # per stage
    backward_input: tuple[float, ...]  # per stage
    backward_weight: tuple[float, ...]  # per stage
    hop: float = 0.0

    @classmethod
    def even(
        cls, p: int, v: int, *, f: float = 1.0, b: float = 1.0, w: float = 1.0, hop: float = 0.0
    ) -> Durations:
        """Equal stages; f, b, w are times of a whole rank, of which each chunk takes 1/v."""
        stages = p * v
        return cls((f / v,) * stages, (b / v,) * stages, (w / v,) * stages, hop)

    def of(self, action: Action) -> float:
        """Duration of a compute action."""
        stage = action.stage
        if action.kind == BACKWARD:
            return self.backward_input[stage] + self.backward_weight[stage]
        per_stage = {
            FORWARD: self.forward,
            BACKWARD_INPUT: self.backward_input,
            BACKWARD_WEIGHT: self.backward_weight,
        }
        return per_stage[action.kind][stage]


class Span(NamedTuple):
    """One action on the time line."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank does what: `spans[rank]` in program order, compute actions only."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """End of the last action of any rank; the step starts at 0."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """Time a rank idles in a step that ends for all ranks together, mean over the ranks."""
        return self.makespan - sum(self.busy) / len(self.spans)

    @property
    def bubble_fraction(self) -> float:
        """The bubble as a share of the step."""
        return self.bubble / self.makespan if self.makespan > 0 else 0.0


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Start and end of every compute action; transfers and reductions are passed over.

    Raises ScheduleError, with a line per stuck rank, when the ranks wait for each other forever.
    """
    programs = [[a for a in actions if a.kind in COMPUTE] for actions in schedule.ranks]
    spans: list[list[Span]] = [[] for _ in programs]
    ends: dict[Action, float] = {}
    waiting: dict[Action, list[int]] = {}  # result -> ranks that cannot go on without it
    ready = list(range(schedule.p))
    while ready:
        rank = ready.pop()
        for action in programs[rank][len(spans[rank]) :]:
            needs = requires(action, schedule.num_stages)
            missing = [need for need in needs if need not in ends]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            free = spans[rank][-1].end if spans[rank] else 0.0
            hops = [0.0 if schedule.place[n.stage] == rank else durations.hop for n in needs]
            start = max([free, *(ends[n] + hop for n, hop in zip(needs, hops, strict=True))])
            spans[rank].append(Span(action, start, start + durations.of(action)))
            for result in provides(action):
                ends[result] = spans[rank][-1].end
                ready += waiting.pop(result, [])
    if waiting:
        raise ScheduleError(_deadlock(schedule, spans, waiting))
    return Timeline(tuple(tuple(rank_spans) for rank_spans in spans))


def _deadlock(schedule: Schedule, spans: list[list[Span]], waiting: dict[Action, list[int]]) -> str:
    lines = ["the schedule deadlocks:"]
    for rank, result in sorted((rank, need) for need, ranks in waiting.items() for rank in ranks):
        compute = [(i, a) for i, a in enumerate(schedule.ranks[rank]) if a.kind in COMPUTE]
        index, action = compute[len(spans[rank])]
        lines.append(f"rank {rank}, index {index}, action {action}: waits for {result}")
    return "\n".join(lines)


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most (stage, microbatch) pairs held at once, from start of F to end of W.

    Depends on the order only. One pair is 1/v of a rank's activations for one microbatch.
    """
    peaks = []
    for actions in schedule.ranks:
        live = peak = 0
        for action in actions:
            live += action.kind == FORWARD
            peak = max(peak, live)
            live -= action.kind in (BACKWARD_WEIGHT, BACKWARD)
        peaks.append(peak)
    return tuple(peaks)
