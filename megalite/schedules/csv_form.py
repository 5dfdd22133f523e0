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
from collections.abc import Iterator
from dataclasses import dataclass
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
_CELL = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
_PAIR = re.compile(r"\((\d+[FIWB]\d+);(\d+[FIWB]\d+)\)OVERLAP_F_B")


def write_csv(schedule: Schedule) -> str:
    """The compute actions of a schedule, one line per rank."""
    lines = []
    for actions in schedule.ranks:
        cells = (f"{a.stage}{_LETTERS[a.kind]}{a.mb}" for a in actions if a.kind in _LETTERS)
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Row:
    """A rank's actions; `line` and `cells` (from 1) say where in the file each stands."""

    line: int
    cells: tuple[int, ...]
    actions: tuple[Action, ...]

    def where(self, index: int) -> str:
        """Where action `index` stands; the number of them stands for the end."""
        at_end = index >= len(self.cells)
        return f"line {self.line}, {'end' if at_end else f'cell {self.cells[index]}'}"


def read_csv(text: str) -> Schedule:
    """A schedule from its lines: stages live where their cells stand. Raises ScheduleError naming
    line and cell for what is no action, and for whatever `check_schedule` finds.
    """
    rows = list(_read_rows(text))
    place = _place(rows)
    schedule = Schedule(_num_micro_batches(rows), place, tuple(row.actions for row in rows))
    try:
        check_schedule(schedule)
    except ScheduleError as error:
        if error.place is None:
            raise
        rank, index = error.place
        raise ScheduleError(f"{rows[rank].where(index)}: {error}") from None
    return schedule


def load_csv(path: str) -> Schedule:
    """The schedule of a file. Raises ScheduleError naming the file, and line and cell in it."""
    try:
        return read_csv(Path(path).read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ScheduleError(
            f"{path}: cannot be read: no such file below {Path.cwd()}; correct the path, or write "
            "one with `megalite schedule NAME --csv FILE`"
        ) from None
    except OSError as error:
        raise ScheduleError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"{path}: cannot be read: not UTF-8 text (byte {error.start}); give a CSV file"
        ) from None
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None


def read_file(path: str, p: int, v: int, m: int) -> Schedule:
    """A schedule file that must be for p ranks, v chunks each and m microbatches."""
    schedule = load_csv(path)
    found, wanted = (schedule.p, schedule.v, schedule.m), (p, v, m)
    if found != wanted:
        raise ScheduleError(
            f"{path} is for p={found[0]} v={found[1]} m={found[2]}, the run has p={p} v={v} m={m}; "
            "write the file for this layout and number of microbatches, or change them"
        )
    return schedule


def _read_rows(text: str) -> Iterator[_Row]:
    reader = csv.reader(io.StringIO(text))
    try:
        for cells in reader:
            if cells:
                yield _read_row(reader.line_num, cells)
    except csv.Error as error:
        raise ScheduleError(
            f"line {reader.line_num}: not comma-separated text ({error}); give one line per rank, "
            "one cell per action"
        ) from None


def _read_row(line: int, cells: list[str]) -> _Row:
    placed: list[tuple[int, Action]] = []
    for number, cell in enumerate(cells, start=1):
        word = cell.strip()
        pair = _PAIR.fullmatch(word)
        for part in pair.groups() if pair else ([word] if word else []):
            found = _CELL.fullmatch(part)
            if found is None:
                raise ScheduleError(
                    f"line {line}, cell {number}: {_short(word)!r} is no action; expected STAGE "
                    "KIND MICROBATCH with KIND one of F, I, W, B, as in 2I1"
                )
            stage, letter, mb = found.groups()
            placed.append((number, Action(_KINDS[letter], int(stage), int(mb))))
    return _Row(line, tuple(n for n, _ in placed), tuple(action for _, action in placed))


def _place(rows: list[_Row]) -> tuple[int, ...]:
    """The rank that each stage stands on: one each, and equally many on every rank."""
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for index, action in enumerate(row.actions):
            first = owner.setdefault(action.stage, rank)
            if first != rank:
                raise ScheduleError(
                    f"{row.where(index)}: stage {action.stage} stands in line {rows[first].line} "
                    "too; a stage lives on one rank"
                )
    if not owner or sorted(owner) != list(range(len(owner))):
        raise ScheduleError(f"the stages are {sorted(owner)}; they must be 0, 1, 2 and so on")
    counts = [sum(rank == other for other in owner.values()) for rank in range(len(rows))]
    for row, count in zip(rows, counts, strict=True):
        if count != counts[0]:
            raise ScheduleError(
                f"line {row.line}: number of stages is {count}, but {counts[0]} in line "
                f"{rows[0].line}; every rank needs equally many"
            )
    return tuple(owner[stage] for stage in range(len(owner)))


def _num_micro_batches(rows: list[_Row]) -> int:
    """One more than the largest microbatch, which no file of fewer actions can be right about."""
    size = sum(len(row.actions) for row in rows)
    for row in rows:
        for index, action in enumerate(row.actions):
            if action.mb >= size:
                raise ScheduleError(
                    f"{row.where(index)}: microbatch {action.mb} in a file of {size} actions; "
                    "microbatches are 0, 1, 2 and so on"
                )
    return 1 + max(action.mb for row in rows for action in row.actions)


def _short(word: str) -> str:
    return word if len(word) <= 40 else f"{word[:37]}..."
