"""A schedule's time line as a PNG, drawn with matplotlib: the simulated step, then a measured one.

Each rank has a lane of its actions and under it the activations that it holds. Colours and names
are those of the other pictures (`schedules/view/style.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalite.record.figure import FONT_PT, new_figure
from megalite.schedules import Schedule, Timeline
from megalite.schedules.memory import memory_over_time, peak_memory
from megalite.schedules.view.draw_text import label
from megalite.schedules.view.style import (
    HELD_FILL,
    HELD_LINE,
    Unit,
    colour,
    legend,
    text_colour,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 8.0  # inches
_ACTIONS, _MEMORY = (-0.44, 0.14), (0.18, 0.44)  # top and bottom of both parts of a lane of 1
_EDGES_UP_TO = 200  # boxes in a lane beyond which white edges would hide their colours
_LABEL_PT = 7.0
_LETTER_PT = 0.62 * _LABEL_PT  # width of a character of matplotlib's monospace font


def schedule_figure(
    schedule: Schedule,
    timeline: Timeline,
    title: str,
    *,
    unit: Unit,
    measured: Timeline | None = None,
) -> Figure:
    """The picture of a time line, for `save` of record/figure.py.

    unit: of the axis. measured: a second time line, drawn in a panel below at the same scale.
    """
    panels = [timeline] if measured is None else [timeline, measured]
    lane = min(0.5, max(0.22, 8.0 / schedule.p / len(panels)))  # inches
    figure = new_figure(_WIDTH, 1.4 + len(panels) * (lane * schedule.p + 0.3))
    figure.suptitle(title.replace("; ", "\n", 1), size=FONT_PT + 1)
    every = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]

    # One scale of time and one of memory for all lanes and panels, so that they can be compared.
    held = [memory_over_time(schedule, line) for line in panels]
    most = max((peak_memory(line) for lines in held for line in lines), default=0.0) or 1.0
    longest = max(line.makespan for line in panels) or 1.0
    for axes, line, lines in zip(every, panels, held, strict=True):
        _draw_lanes(axes, schedule, line, unit)
        _draw_memory(axes, lines, line.makespan, most, unit)
    every[0].set_xlim(0, longest * unit.factor)
    every[-1].set_xlabel(unit.text, size=FONT_PT)
    if measured is not None:
        for axes, name in zip(every, ("simulated", "measured"), strict=True):
            axes.set_title(name, size=FONT_PT, loc="left")

    # Only a figure that is laid out has a width, by which a label fits its box or not.
    _draw_legend(figure, schedule)
    figure.draw_without_rendering()
    for axes, line in zip(every, panels, strict=True):
        width_pt = axes.get_window_extent().width / figure.dpi * 72
        _draw_labels(axes, schedule, line, unit, width_pt / longest)
    return figure


def _draw_lanes(axes: Axes, schedule: Schedule, timeline: Timeline, unit: Unit) -> None:
    """A box for every action, rank 0 at the top."""
    top, bottom = _ACTIONS
    for rank, spans in enumerate(timeline.spans):
        axes.broken_barh(
            [(start * unit.factor, (end - start) * unit.factor) for _, start, end in spans],
            (rank + top, bottom - top),
            facecolors=[colour(action, schedule) for action, _, _ in spans],
            edgecolor="white",
            linewidth=0.3 if len(spans) <= _EDGES_UP_TO else 0.0,
        )
    middle = sum(_ACTIONS) / 2
    axes.set_yticks(
        [rank + middle for rank in range(schedule.p)],
        [f"rank {rank}" for rank in range(schedule.p)],
    )
    axes.set_ylim(schedule.p - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelsize=FONT_PT)
    axes.spines[["left", "right", "top"]].set_visible(False)


def _draw_memory(
    axes: Axes, held: tuple[list[tuple[float, float]], ...], end: float, most: float, unit: Unit
) -> None:
    """Draw the activations of each rank over time as a filled line, and its peak to the right."""
    top, base = _MEMORY
    for rank, line in enumerate(held):
        steps = [*line, (end, 0.0)]
        axes.fill_between(
            [time * unit.factor for time, _ in steps],
            rank + base,
            [rank + base - value / most * (base - top) for _, value in steps],
            step="post",
            facecolor=HELD_FILL,
            edgecolor=HELD_LINE,
            linewidth=0.5,
        )
        axes.text(
            1.008,
            rank + base,
            f"{peak_memory(line):.3g}",
            transform=axes.get_yaxis_transform(),
            color=HELD_LINE,
            size=_LABEL_PT,
            va="bottom",
        )


def _draw_labels(
    axes: Axes, schedule: Schedule, timeline: Timeline, unit: Unit, pt_per_time: float
) -> None:
    """The short name of each action whose box is wide enough for it."""
    middle = sum(_ACTIONS) / 2
    for rank, spans in enumerate(timeline.spans):
        for action, start, end in spans:
            text = label(action, schedule)
            if (end - start) * pt_per_time >= len(text) * _LETTER_PT:
                axes.text(
                    (start + end) / 2 * unit.factor,
                    rank + middle,
                    text,
                    ha="center",
                    va="center_baseline",
                    size=_LABEL_PT,
                    family="monospace",
                    color=text_colour(colour(action, schedule)),
                )


def _draw_legend(figure: Figure, schedule: Schedule) -> None:
    """A swatch with a stripe per chunk for every kind of action, and one for memory, below."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    entries = legend(schedule)
    swatches: list[Any] = [tuple(Patch(facecolor=one) for one in shades) for _, shades in entries]
    figure.legend(
        swatches,
        [name for name, _ in entries],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside lower center",
        ncols=4 if len(entries) == 4 else 3,
        fontsize=FONT_PT,
        frameon=False,
    )
