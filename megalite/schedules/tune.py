"""Chooses a schedule: simulates every candidate that fits the memory and ranks them.

A search over names and over the family's parameters, with durations that the caller gives; nothing
is measured. All ranks must tune with the same durations, or they would choose differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megalite.errors import ScheduleError
from megalite.schedules.action import Schedule
from megalite.schedules.builders import family_peak
from megalite.schedules.catalogue import SCHEDULES, build, family_name
from megalite.schedules.memory import peak_deferred, peak_live
from megalite.schedules.simulate import Durations, simulate

AUTO = "auto"

_WARM_UPS = (1.0, 1.25, 1.5, 2.0)
_LAGS = (0.0, 0.5, 1.0, 1.5, 2.0)
_AS_SHORT = 0.999  # a step shorter by less than a thousandth does not justify more memory


@dataclass(frozen=True)
class Candidate:
    """A schedule that was simulated; `peak_activations` as the function of that name."""

    name: str
    step: float
    bubble_fraction: float
    peak_activations: float


def tune(
    p: int,
    v: int,
    m: int,
    durations: Durations | None = None,
    max_activations: float | None = None,
    *,
    fused: bool = False,
) -> list[Candidate]:
    """The candidates that hold at most `max_activations` on every rank, best first.

    Activations are whole-rank activations of one microbatch; the default is what 1f1b holds. The
    shortest step is best, then the fewest activations, then the shortest name. Raises ScheduleError
    when no candidate fits.

    fused: only schedules that defer no weight gradient, for runs that recompute activations: a
    deferred weight gradient would keep them.
    """
    times = durations or Durations.even(p, v)
    allowed = peak_activations_of_1f1b(p, v, m) if max_activations is None else max_activations
    simulated = [
        candidate
        for name in candidate_names(p, v, m, fused=fused)
        if (candidate := _simulated(name, p, v, m, times, fused)) is not None
    ]

    # The activations are quotients by v, so that equal ones may differ in the last place.
    fitting = [one for one in simulated if one.peak_activations <= allowed + 1e-9]
    if not fitting:
        least = min(one.peak_activations for one in simulated)
        raise ScheduleError(
            f"no schedule for p={p} v={v} m={m} holds at most {allowed:g} activations a rank; the "
            f"leanest holds {least:g}: allow that, or recompute activations"
        )
    shortest = min(one.step for one in fitting)
    return sorted(fitting, key=lambda one: _sort_key(one, shortest))


def _sort_key(one: Candidate, shortest: float) -> tuple[bool, float, float, int, str]:
    """Practically shortest steps first, by activations, then step; the others by step first."""
    longer = one.step * _AS_SHORT > shortest
    if longer:
        return longer, one.step, one.peak_activations, len(one.name), one.name
    return longer, one.peak_activations, one.step, len(one.name), one.name


def candidate_names(p: int, v: int, m: int, *, fused: bool = False) -> Iterator[str]:
    """Every name that `tune` simulates: named schedules first, then members of the family."""
    for schedule in SCHEDULES.values():
        if schedule.chunks.allows(v) and (schedule.name != "dualpipe-v" or m >= 2 * p):
            yield schedule.name
    groups: list[int | None] = [None]
    if v > 1:
        groups += [size for size in (p + p // 4, p + p // 2, 2 * p) if p < size <= m]
    for group in groups:
        for f in _WARM_UPS:
            for lag in _LAGS:
                yield family_name(f, lag, group, fused=fused)


def _simulated(
    name: str, p: int, v: int, m: int, durations: Durations, fused: bool = False
) -> Candidate | None:
    """The candidate of a name, simulated; None if it is of no use.

    That is one that deadlocks, as large groups can with few microbatches, and, with `fused`, one
    that defers weight gradients.
    """
    try:
        schedule = build(name, p, v, m)
        if fused and any(peak_deferred(schedule)):
            return None
        line = simulate(schedule, durations)
    except ScheduleError:
        return None
    return Candidate(name, line.makespan, line.bubble_fraction, peak_activations(schedule))


def peak_activations(schedule: Schedule) -> float:
    """Most activations that any rank holds, in whole-rank activations of one microbatch."""
    return max(peak_live(schedule)) / schedule.v


def peak_activations_of_1f1b(p: int, v: int, m: int) -> float:
    """Activations that one forward, one backward holds on its first rank.

    In whole-rank activations of one microbatch: p, or a little more where p does not divide m and
    microbatches go through a chunk in larger groups.
    """
    return family_peak(0, p, v, m) / v


def default_name(p: int, v: int, m: int) -> str:
    """Name of the best schedule for equal stages at the memory of 1f1b.

    The default of a run whose config names none. Only named looped schedules are considered, which
    a word can explain.
    """
    best: tuple[float, float, str] = (math.inf, math.inf, "")
    for schedule in SCHEDULES.values():
        if not schedule.chunks.allows(v) or schedule.v_shaped:
            continue
        one = _simulated(schedule.name, p, v, m, Durations.even(p, v))
        if one is not None and one.peak_activations <= peak_activations_of_1f1b(p, v, m) + 1e-9:
            best = min(best, (round(one.step, 9), one.peak_activations, schedule.name))
    return best[2]
