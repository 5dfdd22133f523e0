"""Schedules as comma-separated files in the grammar of torch.distributed.pipelining.

One line per rank, one cell per action: stage, kind, microbatch, as in `0F0`, `2I1` (input
gradient), `2W1` (weight gradient), `2B1` (both in one). Empty cells are idle slots and mean nothing
here. An overlapped pair `(0F2;3B1)OVERLAP_F_B` is read as its parts in order. Transfers are
derived, so cells that send or receive are refused. A user's own schedule comes in this way.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from megalite.errors import ScheduleError
from megalite.schedules.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
)
from megalite.schedules.check import check_schedule

FILE = "file:"  # what a schedule's name starts with when it is a path

_LETTERS = {FORWARD: "F", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W", BACKWARD: "B"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_CELL = re.compile(r"(\d+)([FIWB])(\d+)")
_PAIR = re.compile(r"\((\d+[FIWB]\d+);(\d+[FIWB]\d+)\)OVERLAP_F_B")


def write_csv(schedule: Schedule) -> str:
    """The compute actions of a schedule, one line per rank."""
    lines = []
    for actions in schedule.ranks:
        cells = (f"{a.stage}{_LETTERS[a.kind]}{a.mb}" for a in actions if a.kind in _LETTERS)
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def read_csv(text: str) -> Schedule:
    """A schedule from its lines: stages live where their cells stand. Raises ScheduleError naming
    line and cell for what is no action, and whatever `check_schedule` finds.
    """
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    ranks = [_read_row(number, row) for number, row in enumerate(rows, start=1)]
    owner: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if owner.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"line {rank + 1}: stage {action.stage} stands in line "
                    f"{owner[action.stage] + 1} too; a stage lives on one rank"
                )
    if not owner or sorted(owner) != list(range(len(owner))):
        raise ScheduleError(f"the stages are {sorted(owner)}; they must be 0, 1, 2 and so on")
    m = 1 + max(action.mb for actions in ranks for action in actions)
    place = tuple(owner[stage] for stage in range(len(owner)))
    schedule = Schedule(m, place, tuple(ranks))
    check_schedule(schedule)
    return schedule


def read_file(path: str, p: int, v: int, m: int) -> Schedule:
    """A schedule file that must be for p ranks, v chunks each and m microbatches."""
    try:
        schedule = read_csv(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path}: cannot be read ({error})") from None
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    found, wanted = (schedule.p, schedule.v, schedule.m), (p, v, m)
    if found != wanted:
        raise ScheduleError(
            f"{path} is for p={found[0]} v={found[1]} m={found[2]}, the run has p={p} v={v} m={m}; "
            "write the file for this layout and number of microbatches, or change them"
        )
    return schedule


def _read_row(number: int, cells: list[str]) -> tuple[Action, ...]:
    actions: list[Action] = []
    for index, cell in enumerate(cells, start=1):
        word = cell.strip()
        pair = _PAIR.fullmatch(word)
        for part in pair.groups() if pair else ([word] if word else []):
            found = _CELL.fullmatch(part)
            if found is None:
                raise ScheduleError(
                    f"line {number}, cell {index}: {word!r} is no action; expected STAGE KIND "
                    "MICROBATCH with KIND one of F, I, W, B, as in 2I1"
                )
            stage, letter, mb = found.groups()
            actions.append(Action(_KINDS[letter], int(stage), int(mb)))
    return tuple(actions)
