"""Activation memory of a schedule: live activations per rank, as a peak and over time.

Depends on the order of a rank's own actions, and on a time line only for the picture over time.
Counts (stage, microbatch) pairs, or weights that the caller gives for them: bytes, for a caller
that knows the model (`megalite.planner`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from megalite.schedules.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECOMPUTE,
    Action,
    Schedule,
)
from megalite.schedules.simulate import Timeline


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most (stage, microbatch) pairs held at once, from start of F to end of W.

    Depends on the order only. One pair is 1/v of a rank's activations for one microbatch.
    """
    return _peaks(schedule, FORWARD, (BACKWARD_WEIGHT, BACKWARD))


def peak_deferred(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most weight gradients deferred at once: their B is done, their W is not."""
    return _peaks(schedule, BACKWARD_INPUT, (BACKWARD_WEIGHT,))


def _peaks(schedule: Schedule, opens: str, closes: tuple[str, ...]) -> tuple[int, ...]:
    """Per rank, the most actions of kind `opens` that none of kinds `closes` has ended."""
    peaks = []
    for actions in schedule.ranks:
        held = (1 if a.kind == opens else -1 if a.kind in closes else 0 for a in actions)
        peaks.append(max(accumulate(held, initial=0)))
    return tuple(peaks)


@dataclass(frozen=True)
class MicrobatchMemory:
    """Memory that one microbatch of a stage holds, in any unit.

    activations: from its forward (or its recomputation, if it has one) to its input gradient.
    checkpoint: from its forward to its recomputation; not used without a recomputation.
    deferred: from its input gradient to its weight gradient, where the two are split.
    """

    activations: float = 1.0
    checkpoint: float = 0.0
    deferred: float = 1.0


def memory_over_time(
    schedule: Schedule, timeline: Timeline, held: tuple[MicrobatchMemory, ...] | None = None
) -> tuple[list[tuple[float, float]], ...]:
    """Per rank, (time, memory held from then on) at every change.

    `held` is per stage; default: each (stage, microbatch) pair weighs 1/v from the start of its F
    to the end of its W.
    """
    share = 1 / schedule.v
    per_stage = held or (MicrobatchMemory(share, 0.0, share),) * schedule.num_stages
    lines = []
    for spans in timeline.spans:
        recomputed = {(a.stage, a.mb) for a, _, _ in spans if a.kind == RECOMPUTE}
        changes = [
            _change(action, start, end, per_stage[action.stage], recomputed)
            for action, start, end in spans
        ]
        lines.append(_running_sum(changes))
    return tuple(lines)


def _change(
    action: Action,
    start: float,
    end: float,
    held: MicrobatchMemory,
    recomputed: set[tuple[int, int]],
) -> tuple[float, float]:
    """The moment at which an action changes the memory held, and by how much.

    `recomputed`: (stage, microbatch) pairs whose forward is run again later.
    """
    kind = action.kind
    if kind == FORWARD:
        again = (action.stage, action.mb) in recomputed
        return start, held.checkpoint if again else held.activations
    if kind == RECOMPUTE:
        return start, held.activations - held.checkpoint
    if kind == BACKWARD:
        return end, -held.activations
    if kind == BACKWARD_INPUT:
        return end, held.deferred - held.activations
    return end, -held.deferred


def _running_sum(changes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(time, sum of all changes up to then), in time order."""
    line: list[tuple[float, float]] = []
    total = 0.0
    for time, change in sorted(changes):  # at one moment memory is freed before it is taken
        total += change
        if line and line[-1][0] == time:
            line[-1] = (time, total)
        else:
            line.append((time, total))
    return line


def peak_memory(line: list[tuple[float, float]]) -> float:
    """The most that one rank's line of `memory_over_time` reaches."""
    return max((held for _, held in line), default=0.0)
