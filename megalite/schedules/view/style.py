"""Colours, names and units that all pictures of a schedule share.

The colours stay apart for colour-blind readers, and the kinds by lightness where they are printed
in grey.
"""

from __future__ import annotations

from typing import NamedTuple

from megalite.schedules.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECOMPUTE,
    Action,
    Schedule,
)


class Style(NamedTuple):
    """The looks of one kind of action."""

    name: str
    letter: str  # in labels
    shades: tuple[str, str, str, str]  # light to dark
    terminal: str  # a colour by rich's name


class Unit(NamedTuple):
    """The unit of a time axis: its text, and its number in one unit of the time line."""

    text: str
    factor: float = 1.0


STYLES = {
    FORWARD: Style("forward", "F", ("#8cbfe6", "#3d8bca", "#17598f", "#0d4472"), "blue"),
    BACKWARD_INPUT: Style(
        "input gradient", "B", ("#a6e3c4", "#4fc493", "#1f8f66", "#0f5c42"), "green"
    ),
    BACKWARD_WEIGHT: Style(
        "weight gradient", "W", ("#fff0b3", "#fbd34d", "#d9a514", "#94700a"), "yellow"
    ),
    BACKWARD: Style("full backward", "D", ("#dd8059", "#b34a20", "#82300f", "#641f06"), "cyan"),
    RECOMPUTE: Style(
        "recompute", "R", ("#ececec", "#d2d2d2", "#adadad", "#858585"), "bright_black"
    ),
}
HELD_FILL, HELD_LINE = "#e6dcf5", "#6f48ad"


def legend(schedule: Schedule) -> list[tuple[str, tuple[str, ...]]]:
    """Text and shades of each kind of compute action that a schedule has, then of its memory.

    Chunk 0 comes first.
    """
    present = {action.kind for actions in schedule.ranks for action in actions}
    chunks = range(min(schedule.v, 4))
    entries = [
        (f"{style.name} ({style.letter})", tuple(_shade(style, schedule.v, i) for i in chunks))
        for kind, style in STYLES.items()
        if kind in present
    ]
    held = "from R on" if RECOMPUTE in present else "held"
    return [*entries, (f"activations {held}, in microbatches (peak: right)", (HELD_FILL,))]


def colour(action: Action, schedule: Schedule) -> str:
    """Fill colour of an action: by its kind, darker for later chunks."""
    chunk = schedule.stages_of(schedule.place[action.stage]).index(action.stage)
    return _shade(STYLES[action.kind], schedule.v, chunk)


def _shade(style: Style, chunks: int, chunk: int) -> str:
    """The shade of a chunk; a lone one has the second, which is the strongest colour."""
    return style.shades[1 if chunks == 1 else min(chunk, len(style.shades) - 1)]


def text_colour(fill: str) -> str:
    """Black or white, whichever has the more contrast on a fill "#rrggbb"."""
    red, green, blue = (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "black" if luminance > 0.18 else "white"  # where both have a contrast of 4.6 to 1
