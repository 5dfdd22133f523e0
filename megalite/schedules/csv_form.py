"""Schedules as comma-separated files in the grammar of torch.distributed.pipelining.

One line per rank, one cell per action: stage, kind, microbatch, as in `0F0`, `2I1` (input
gradient), `2W1` (weight gradient), `2B1` (both in one). Empty cells are idle slots and mean nothing
here. An overlapped pair `(0F2;3B1)OVERLAP_F_B` is read as its parts in order. Transfers are
derived, so cells that send or receive are refused. This is how users bring their own schedules.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import expanduser
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
from megalite.wording import number_of

FILE = "file:"  # start of a schedule's name that is a path

_LETTER_OF = {FORWARD: "F", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W", BACKWARD: "B"}
_KIND_OF = {letter: kind for kind, letter in _LETTER_OF.items()}
_CELL = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
_PAIR = re.compile(r"\((\d+[FIWB]\d+);(\d+[FIWB]\d+)\)OVERLAP_F_B")


def write_csv(schedule: Schedule) -> str:
    """The compute actions of a schedule, one line per rank."""
    lines = []
    for actions in schedule.ranks:
        cells = (f"{a.stage}{_LETTER_OF[a.kind]}{a.mb}" for a in actions if a.kind in _LETTER_OF)
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Row:
    """A rank's actions, with the line of the file and the cell of each action, from 1."""

    line: int
    cells: tuple[int, ...]
    actions: tuple[Action, ...]

    def where(self, index: int) -> str:
        """The line and cell of action `index`, as text; the end for an index past the last."""
        at_end = index >= len(self.cells)
        return f"line {self.line}, {'end' if at_end else f'cell {self.cells[index]}'}"


def read_csv(text: str) -> Schedule:
    """A schedule from its lines; a stage lives on the rank of the line that its cells are in.

    Raises ScheduleError naming line and cell, for cells that are no action and for everything that
    `check_schedule` finds.
    """
    rows = list(_read_rows(text))
    place = _placement(rows)
    schedule = Schedule(_num_micro_batches(rows), place, tuple(row.actions for row in rows))
    try:
        check_schedule(schedule)
    except ScheduleError as error:
        if error.position is None:
            raise
        rank, index = error.position
        raise ScheduleError(f"{rows[rank].where(index)}: {error}") from None
    return schedule


def load_csv(path: str) -> Schedule:
    """The schedule of a file. Raises ScheduleError naming the file, and line and cell in it."""
    path = expanduser(path)
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
    """The schedule of a file that must be for p ranks, v chunks each and m microbatches.

    Raises ScheduleError if it is for others, and as `load_csv`.
    """
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
    found: list[tuple[int, Action]] = []  # cell and action: a pair gives two of one cell
    for number, cell in enumerate(cells, start=1):
        word = cell.strip()
        pair = _PAIR.fullmatch(word)
        for part in pair.groups() if pair else ([word] if word else []):
            fields = _CELL.fullmatch(part)
            if fields is None:
                raise ScheduleError(
                    f"line {line}, cell {number}: {_short(word)!r} is no action; expected STAGE "
                    "KIND MICROBATCH with KIND one of F, I, W, B, as in 2I1"
                )
            stage, letter, mb = fields.groups()
            found.append((number, Action(_KIND_OF[letter], int(stage), int(mb))))
    return _Row(line, tuple(n for n, _ in found), tuple(action for _, action in found))


def _placement(rows: list[_Row]) -> tuple[int, ...]:
    """The rank of each stage. Raises ScheduleError unless every rank has equally many stages."""
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
    """The number of microbatches: one more than the largest index.

    An index of at least the number of actions is an error, found here before anything is allocated
    for so many microbatches.
    """
    size = sum(len(row.actions) for row in rows)
    for row in rows:
        for index, action in enumerate(row.actions):
            if action.mb >= size:
                raise ScheduleError(
                    f"{row.where(index)}: microbatch {action.mb} in a file of "
                    f"{number_of(size, 'action')}; "
                    "microbatches are 0, 1, 2 and so on"
                )
    return 1 + max(action.mb for row in rows for action in row.actions)


def _short(word: str) -> str:
    return word if len(word) <= 40 else f"{word[:37]}..."
