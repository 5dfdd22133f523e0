"""A schedule's time line as a bitmap, drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path

from megalite.errors import ScheduleError
from megalite.schedules import Schedule, Timeline
from megalite.schedules.view.draw_svg import colour
from megalite.schedules.view.draw_text import label

_LABELS_UP_TO = 60  # microbatch slots in a row beyond which labels would overlap


def draw_png(schedule: Schedule, timeline: Timeline, title: str, path: Path) -> None:
    """Draw one bar per rank into a file. Raises ScheduleError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Drawn without pyplot, which would open a display.
    figure = Figure(figsize=(14, 1.2 + 0.45 * schedule.p), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for rank, spans in enumerate(timeline.spans):
        axes.broken_barh(
            [(start, end - start) for _, start, end in spans],
            (rank - 0.4, 0.8),
            facecolors=[colour(action, schedule) for action, _, _ in spans],
            edgecolor="white",
            linewidth=0.4,
        )
        if len(spans) <= _LABELS_UP_TO:
            for action, start, end in spans:
                middle = ((start + end) / 2, rank)
                axes.annotate(label(action, schedule), middle, ha="center", va="center", size=7)

    # Rank 0 at the top, as in the other pictures.
    axes.set_yticks(range(schedule.p), [f"rank {rank}" for rank in range(schedule.p)])
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.makespan or 1.0)
    axes.set_xlabel("time")
    axes.set_title(title, size=10)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{path} cannot be written: {error}") from None
