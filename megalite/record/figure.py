"""Figures as PNG files: the one home of how matplotlib is used. No display is opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megalite.errors import MegaliteError, cannot_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 160
FONT_PT = 8.0  # read well where a figure of 8 inches is shown 800 pixels wide


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches, which lays out what is put into it by itself."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would open a display
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG without dates or versions. Raises MegaliteError if that fails."""
    try:
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise MegaliteError(cannot_write(path, error)) from None
