"""Pipeline schedules as data: built, checked, simulated and lowered without torch.

Reading order: `action` (the value), `builders` and `v_shape` (make it), `catalogue` (names),
`check` (with `blocking`), `simulate` and `memory`, `lower` (to a program with transfers),
`tune` (chooses one), `csv_form` (files), `view` (drawings).
"""

from megalite.schedules.action import Action, Schedule, parse
from megalite.schedules.builders import (
    family,
    forward_schedule,
    fuse,
    recompute,
)
from megalite.schedules.catalogue import NAMES, SCHEDULES, NamedSchedule, build
from megalite.schedules.check import check_posted, check_program, check_schedule
from megalite.schedules.lower import lower, post_ahead
from megalite.schedules.memory import peak_live
from megalite.schedules.simulate import Durations, Timeline, simulate

__all__ = [
    "NAMES",
    "SCHEDULES",
    "Action",
    "Durations",
    "NamedSchedule",
    "Schedule",
    "Timeline",
    "build",
    "check_posted",
    "check_program",
    "check_schedule",
    "family",
    "forward_schedule",
    "fuse",
    "lower",
    "parse",
    "peak_live",
    "post_ahead",
    "recompute",
    "simulate",
]
