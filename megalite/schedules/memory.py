"""What a schedule holds: live activations per rank, as a peak and over time.

Depends on the order of a rank's own actions, and on a time line only for the picture over time.
Counts (stage, microbatch) pairs or given weights of them; bytes are for whoever knows the model.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    peaks = []
    for actions in schedule.ranks:
        live = peak = 0
        for action in actions:
            live += action.kind == FORWARD
            peak = max(peak, live)
            live -= action.kind in (BACKWARD_WEIGHT, BACKWARD)
        peaks.append(peak)
    return tuple(peaks)


def peak_deferred(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most weight gradients put off at once: B is done, its W is not."""
    peaks = []
    for actions in schedule.ranks:
        kinds = [action.kind for action in actions]
        pending = peak = 0
        for kind in kinds:
            pending += (kind == BACKWARD_INPUT) - (kind == BACKWARD_WEIGHT)
            peak = max(peak, pending)
        peaks.append(peak)
    return tuple(peaks)


@dataclass(frozen=True)
class Held:
    """What one microbatch of a stage holds, in any unit.

    activations: from its forward (or its recomputation, if it has one) to its input gradient.
    checkpoint: from a forward to its recomputation; without one, not used.
    deferred: from an input gradient to its weight gradient, where the two are split.
    """

    activations: float = 1.0
    checkpoint: float = 0.0
    deferred: float = 1.0


def memory_over_time(
    schedule: Schedule, timeline: Timeline, held: tuple[Held, ...] | None = None
) -> tuple[list[tuple[float, float]], ...]:
    """Per rank, (time, held from then on) at every change. `held` is per stage; default: each
    (stage, microbatch) pair weighs 1/v from the start of F to the end of W.
    """
    per_stage = held or (Held(1 / schedule.v, 0.0, 1 / schedule.v),) * schedule.num_stages
    lines = []
    for spans in timeline.spans:
        recomputed = {a[1:] for a, _, _ in spans if a.kind == RECOMPUTE}
        changes: list[tuple[float, float]] = []
        for action, start, end in spans:
            weights = per_stage[action.stage]
            changes += _changes(action, start, end, weights, action[1:] in recomputed)
        lines.append(_running_sum(changes))
    return tuple(lines)


def _changes(
    action: Action, start: float, end: float, held: Held, recomputed: bool
) -> list[tuple[float, float]]:
    """What an action adds and takes away, and when."""
    kind = action.kind
    if kind == FORWARD:
        return [(start, held.checkpoint if recomputed else held.activations)]
    if kind == RECOMPUTE:
        return [(start, held.activations - held.checkpoint)]
    if kind == BACKWARD:
        return [(end, -held.activations)]
    if kind == BACKWARD_INPUT:
        return [(end, held.deferred - held.activations)]
    return [(end, -held.deferred)]


def _running_sum(changes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sums in time order; at one moment what is freed goes before what is taken."""
    line: list[tuple[float, float]] = []
    total = 0.0
    for time, change in sorted(changes):
        total += change
        if line and line[-1][0] == time:
            line[-1] = (time, total)
        else:
            line.append((time, total))
    return line


def peak_memory(line: list[tuple[float, float]]) -> float:
    """The most that one rank's line of `memory_over_time` reaches."""
    return max((held for _, held in line), default=0.0)
