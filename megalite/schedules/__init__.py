"""Pipeline schedules as data: built, checked, simulated and lowered without torch."""

from megalite.schedules.action import Action, Schedule, parse
from megalite.schedules.builders import NAMES, build, family, forward_only, forward_schedule, fuse
from megalite.schedules.check import check_program, check_schedule
from megalite.schedules.lower import lower
from megalite.schedules.simulate import Durations, Timeline, peak_live, simulate

__all__ = [
    "NAMES",
    "Action",
    "Durations",
    "Schedule",
    "Timeline",
    "build",
    "check_program",
    "check_schedule",
    "family",
    "forward_only",
    "forward_schedule",
    "fuse",
    "lower",
    "parse",
    "peak_live",
    "simulate",
]
