"""Activation memory of a schedule: live activations per rank, as a peak and over time.

Depends on the order of a rank's own actions, and on a time line only for the picture over time.
Counts (stage, microbatch) pairs, or weights that the caller gives for them: bytes, for a caller
that knows the model (`megalite.planner`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from megalite.schedules.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    RECOMPUTE,
    Action,
    Schedule,
)
from megalite.schedules.simulate import Timeline


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


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most (stage, microbatch) pairs held at once, by the order of actions alone.

    A pair is held from the start of its F, or of its R where the forward is run again, to the end
    of its W. One pair is 1/v of a rank's activations for one microbatch.
    """
    pair, peaks = MicrobatchMemory(), []
    for actions in schedule.keep(COMPUTE).ranks:
        again = _recomputed(actions)
        held = accumulate((_change(action, pair, again) for action in actions), initial=0.0)
        peaks.append(int(max(held)))
    return tuple(peaks)


def peak_deferred(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most weight gradients deferred at once: their B is done, their W is not."""
    deferred = {BACKWARD_INPUT: 1, BACKWARD_WEIGHT: -1}
    return tuple(
        max(accumulate((deferred.get(action.kind, 0) for action in actions), initial=0))
        for actions in schedule.ranks
    )


def memory_over_time(
    schedule: Schedule, timeline: Timeline, held: tuple[MicrobatchMemory, ...] | None = None
) -> tuple[list[tuple[float, float]], ...]:
    """Per rank, (time, memory held from then on) at every change.

    `held` is per stage; default: each pair of `peak_live` weighs 1/v.
    """
    share = 1 / schedule.v
    per_stage = held or (MicrobatchMemory(share, 0.0, share),) * schedule.num_stages
    lines = []
    for spans in timeline.spans:
        again = _recomputed(action for action, _, _ in spans)
        changes = [
            (
                start if action.kind in (FORWARD, RECOMPUTE) else end,
                _change(action, per_stage[action.stage], again),
            )
            for action, start, end in spans
        ]
        lines.append(_running_sum(changes))
    return tuple(lines)


def _recomputed(actions: Iterable[Action]) -> set[tuple[int, int]]:
    """The (stage, microbatch) pairs whose forward is run again."""
    return {(action.stage, action.mb) for action in actions if action.kind == RECOMPUTE}


def _change(action: Action, held: MicrobatchMemory, recomputed: set[tuple[int, int]]) -> float:
    """The memory that a compute action takes at its start, or with a minus frees at its end.

    `recomputed`: (stage, microbatch) pairs whose forward is run again later.
    """
    kind = action.kind
    if kind == FORWARD:
        again = (action.stage, action.mb) in recomputed
        return held.checkpoint if again else held.activations
    if kind == RECOMPUTE:
        return held.activations - held.checkpoint
    if kind == BACKWARD:
        return -held.activations
    if kind == BACKWARD_INPUT:
        return held.deferred - held.activations
    return -held.deferred


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
