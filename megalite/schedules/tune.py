"""Chooses a schedule: simulates every candidate that fits the memory and ranks them.

A search over names and over the family's parameters; takes durations as they are given and does
not measure. All ranks must tune with the same durations, or they would choose differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megalite.errors import ScheduleError
from megalite.schedules.action import Schedule
from megalite.schedules.builders import family_peak
from megalite.schedules.catalogue import KINDS, build, family_name
from megalite.schedules.memory import peak_deferred, peak_live
from megalite.schedules.simulate import Durations, simulate

AUTO = "auto"

_WARM_UPS = (1.0, 1.25, 1.5, 2.0)
_LAGS = (0.0, 0.5, 1.0, 1.5, 2.0)
_FEW = 0.999  # a longer step by less than a thousandth does not justify more memory


@dataclass(frozen=True)
class Candidate:
    """A schedule that was tried. memory: most of any rank, in whole-rank activations."""

    name: str
    step: float
    bubble_fraction: float
    memory: float


def tune(
    p: int,
    v: int,
    m: int,
    durations: Durations | None = None,
    memory: float | None = None,
    *,
    fused: bool = False,
) -> list[Candidate]:
    """Candidates that fit `memory` (whole-rank activations of one microbatch; default: those of
    1f1b), best first: shortest step, then least memory, then name. Raises ScheduleError when none
    fits.

    fused: only those that put no weight gradient off, for runs that recompute what one would keep.
    """
    times = durations or Durations.even(p, v)
    allowed = memory_of_1f1b(p, v, m) if memory is None else memory
    tried = [_try(name, p, v, m, times, fused) for name in candidate_names(p, v, m, fused=fused)]
    fitting = [one for one in tried if one is not None and one.memory <= allowed + 1e-9]
    if not fitting:
        least = min(one.memory for one in tried if one is not None)
        raise ScheduleError(
            f"no schedule for p={p} v={v} m={m} holds at most {allowed:g} activations a rank; the "
            f"leanest holds {least:g}: allow that, or recompute activations"
        )
    shortest = min(one.step for one in fitting)
    return sorted(fitting, key=lambda one: _order(one, shortest))


def _order(one: Candidate, shortest: float) -> tuple[bool, float, float, int, str]:
    """Among those as short as the shortest, up to a hair, the leanest; then by step."""
    longer = one.step * _FEW > shortest
    first, second = (one.step, one.memory) if longer else (one.memory, one.step)
    return longer, first, second, len(one.name), one.name


def candidate_names(p: int, v: int, m: int, *, fused: bool = False) -> Iterator[str]:
    """Every name that `tune` tries: named schedules first, then members of the family."""
    for kind in KINDS.values():
        if kind.allows(v) and (kind.name != "dualpipe-v" or m >= 2 * p):
            yield kind.name
    groups: list[int | None] = [None]
    if v > 1:
        groups += [size for size in (p + p // 4, p + p // 2, 2 * p) if p < size <= m]
    for group in groups:
        for f in _WARM_UPS:
            for lag in _LAGS:
                yield family_name(f, lag, group, fused=fused)


def _try(
    name: str, p: int, v: int, m: int, durations: Durations, fused: bool = False
) -> Candidate | None:
    """None for a candidate that deadlocks, as large groups can with few microbatches, or that puts
    weight gradients off where it must not.
    """
    try:
        schedule = build(name, p, v, m)
        if fused and any(peak_deferred(schedule)):
            return None
        line = simulate(schedule, durations)
    except ScheduleError:
        return None
    return Candidate(name, line.makespan, line.bubble_fraction, memory_of(schedule))


def memory_of(schedule: Schedule) -> float:
    """Most activations any rank holds, in whole-rank activations of one microbatch."""
    return max(peak_live(schedule)) / schedule.v


def memory_of_1f1b(p: int, v: int, m: int) -> float:
    """What one forward, one backward holds on the first rank: p activations, a little more where
    p does not divide m and chunks go in larger groups.
    """
    return family_peak(0, p, v, m) / v


def default_name(p: int, v: int, m: int) -> str:
    """The best schedule at the memory of 1f1b for equal stages, by name: what a run uses that says
    nothing. Only named looped schedules are considered, so that it can be explained in a word.
    """
    best: tuple[float, float, str] = (math.inf, math.inf, "")
    for kind in KINDS.values():
        if not kind.allows(v) or kind.v_shaped:
            continue
        one = _try(kind.name, p, v, m, Durations.even(p, v))
        if one is not None and one.memory <= memory_of_1f1b(p, v, m) + 1e-9:
            best = min(best, (round(one.step, 9), one.memory, kind.name))
    return best[2]
