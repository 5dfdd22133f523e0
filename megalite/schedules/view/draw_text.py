"""A schedule's time line as text: one row per rank, one column per unit of time.

With two chunks per rank the letters of chunk 0 are small; with more, a letter after the number is
the chunk (a is chunk 0). A backward in one action is D. Later columns of an action are dashes. Each
cell carries its action, by which the command line colours it.
"""

from __future__ import annotations

from typing import NamedTuple

from megalite.errors import ScheduleError
from megalite.schedules.action import Action, Schedule
from megalite.schedules.simulate import Timeline
from megalite.schedules.view.style import STYLES

MAX_COLUMNS = 2000


class Cell(NamedTuple):
    """One column of a row: its text, and its action, or None where the rank is idle."""

    text: str
    action: Action | None


def label(action: Action, schedule: Schedule) -> str:
    """The short name of an action: kind, microbatch and, if a rank has several, its chunk."""
    rank = schedule.place[action.stage]
    chunk = schedule.stages_of(rank).index(action.stage)
    kind = STYLES[action.kind].letter
    if schedule.v == 2 and chunk == 0:
        kind = kind.lower()
    suffix = chr(ord("a") + chunk % 26) if schedule.v > 2 else ""
    return f"{kind}{action.mb}{suffix}"


def draw_text(
    schedule: Schedule, timeline: Timeline, unit: float | None = None
) -> list[list[Cell]]:
    """One row of cells per rank, all equally long.

    unit: time of a column (default: the shortest action). Raises ScheduleError for a unit that is
    not positive, and where the rows would have more than `MAX_COLUMNS` columns.
    """
    spans = [span for row in timeline.spans for span in row]
    lengths = [end - start for _, start, end in spans if end > start]
    step = unit if unit is not None else min(lengths, default=1.0)
    if step <= 0:
        raise ScheduleError(f"unit={step:g} must be > 0")
    columns = round(timeline.makespan / step)
    if columns > MAX_COLUMNS:
        raise ScheduleError(
            f"the picture would be {columns} columns wide, {MAX_COLUMNS} are allowed; use a "
            f"longer unit (this one is {step:g}), fewer microbatches, or draw it as svg or html"
        )

    # One width for all cells, so that columns of different rows are the same moment.
    labels = {action: label(action, schedule) for action, _, _ in spans}
    width = max(map(len, labels.values()), default=1) + 1
    rows = []
    for row in timeline.spans:
        cells = [Cell(".".ljust(width), None)] * max(columns, 1)
        for action, start, end in row:
            first = min(round(start / step), len(cells) - 1)
            for column in range(first, max(first + 1, min(round(end / step), len(cells)))):
                text = labels[action] if column == first else "-" * (width - 1)
                cells[column] = Cell(text.ljust(width), action)
        rows.append(cells)
    return rows


def plain(rows: list[list[Cell]]) -> list[str]:
    """The rows as lines without colour, each after its rank."""
    digits = len(str(len(rows) - 1))
    return [
        f"{rank:>{digits}} {''.join(cell.text for cell in row)}".rstrip()
        for rank, row in enumerate(rows)
    ]
