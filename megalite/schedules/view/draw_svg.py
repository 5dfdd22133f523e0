"""A schedule's time line as a picture: SVG, and HTML around it that zooms.

One lane per rank with a box per action, and under it the activations that the rank holds. The
tooltip of a box has its action, its times and what its rank holds then. The result is text; no
library draws it.
"""

from __future__ import annotations

from bisect import bisect_right
from html import escape

from megalite.schedules.action import Schedule
from megalite.schedules.memory import memory_over_time, peak_memory
from megalite.schedules.simulate import Timeline
from megalite.schedules.view.draw_text import label
from megalite.schedules.view.style import (
    HELD_FILL,
    HELD_LINE,
    STYLES,
    Unit,
    colour,
    legend,
    text_colour,
)

_WIDTH, _LEFT, _RIGHT, _TOP, _LANE, _MEMORY, _GAP = 1120, 76, 40, 58, 24, 14, 8  # pixels
_LABEL_WIDTH = 7.3  # of a character at the font size used
_EDGED = 5.0  # width from which a box has a white edge: narrower ones would be mostly edge


def draw_svg(
    schedule: Schedule,
    timeline: Timeline,
    title: str,
    *,
    unit: Unit,
    measured: Timeline | None = None,
) -> str:
    """The picture as SVG text.

    unit: of the axis. measured: a second time line, drawn under each simulated lane at the same
    scale.
    """
    # One scale of time and one of memory for all ranks, so that lanes can be compared.
    longest = max(timeline.makespan, measured.makespan if measured else 0.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    held = memory_over_time(schedule, timeline)
    most = max((value for line in held for _, value in line), default=1.0) or 1.0

    lane = _LANE + (_LANE if measured else 0) + _MEMORY + _GAP
    height = _TOP + lane * schedule.p + 48
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="monospace" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="18">{escape(title)}</text>',
        *_legend(schedule),
    ]

    # A rank's lane, top down: simulated actions, measured ones if given, memory.
    for rank in range(schedule.p):
        top = _TOP + lane * rank
        parts.append(f'<text x="10" y="{top + 16}">rank {rank}</text>')
        parts += _lane(schedule, timeline, rank, top, scale, held[rank])
        below = top + _LANE
        if measured is not None:
            parts.append(f'<text x="10" y="{below + 16}" fill="#777">measured</text>')
            parts += _lane(schedule, measured, rank, below, scale, held[rank])
            below += _LANE
        parts.append(_memory_line(held[rank], below + 2, scale, most, timeline.makespan))
        peak_x, peak_y = _WIDTH - _RIGHT + 6, below + _MEMORY + 2
        peak = f"{peak_memory(held[rank]):.3g}"
        parts.append(f'<text x="{peak_x}" y="{peak_y}" fill="{HELD_LINE}">{peak}</text>')
    parts += _axis(longest, scale, unit, height - 40)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lane(
    schedule: Schedule,
    timeline: Timeline,
    rank: int,
    top: int,
    scale: float,
    held: list[tuple[float, float]],
) -> list[str]:
    """The boxes of a rank's actions; `held` is its line of `memory_over_time`."""
    times = [time for time, _ in held]
    boxes = []
    for action, start, end in timeline.spans[rank]:
        x, wide = _LEFT + start * scale, max((end - start) * scale, 0.5)
        at = bisect_right(times, start) - 1
        fill = colour(action, schedule)
        edge = ' stroke="white" stroke-width="0.5"' if wide >= _EDGED else ""
        note = (
            f"{STYLES[action.kind].name} of stage {action.stage}, microbatch {action.mb}: "
            f"{start:.4g} to {end:.4g}; the rank holds {held[at][1] if at >= 0 else 0:.4g}"
        )
        boxes.append(
            f'<g><title>{escape(note)}</title><rect x="{x:.2f}" y="{top}" width="{wide:.2f}" '
            f'height="{_LANE - 4}" fill="{fill}"{edge}/>'
        )

        # A label that is wider than its box would cover its neighbours'; the tooltip remains.
        text = label(action, schedule)
        if wide >= _LABEL_WIDTH * len(text) + 2:
            middle = x + wide / 2
            boxes.append(
                f'<text x="{middle:.2f}" y="{top + 14}" text-anchor="middle" '
                f'fill="{text_colour(fill)}">{text}</text>'
            )
        boxes.append("</g>")
    return boxes


def _memory_line(
    held: list[tuple[float, float]], top: int, scale: float, most: float, end: float
) -> str:
    """The memory that a rank holds, as a filled line of steps."""
    base = top + _MEMORY
    points, level = [f"{_LEFT},{base}"], 0.0
    for time, value in [*held, (end, 0.0)]:
        x = _LEFT + time * scale
        points += [f"{x:.2f},{base - level / most * _MEMORY:.2f}"]
        level = value
        points += [f"{x:.2f},{base - level / most * _MEMORY:.2f}"]
    return (
        f"<g><title>held by this rank; at most {peak_memory(held):.4g}</title>"
        f'<polygon points="{" ".join(points)}" fill="{HELD_FILL}" stroke="{HELD_LINE}" '
        'stroke-width="0.6"/></g>'
    )


def _axis(longest: float, scale: float, unit: Unit, y: int) -> list[str]:
    step = _round_step(longest * unit.factor / 10)
    parts = []
    for index in range(int(longest * unit.factor / step) + 1):
        x = _LEFT + index * step / unit.factor * scale
        parts.append(f'<line x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + 5}" stroke="black"/>')
        text = f"{index * step:.6g}"
        parts.append(f'<text x="{x:.2f}" y="{y + 18}" text-anchor="middle">{text}</text>')
    middle = _LEFT + longest * scale / 2
    text = escape(unit.text)
    parts.append(f'<text x="{middle:.2f}" y="{y + 34}" text-anchor="middle">{text}</text>')
    return parts


def _round_step(rough: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is at least `rough`."""
    power = 1.0
    while power > rough:
        power /= 10
    while power * 10 <= rough:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)


def _legend(schedule: Schedule) -> list[str]:
    """A swatch with a stripe per chunk and a text for every kind of action, and for memory."""
    parts, x = [], 10.0
    for name, shades in legend(schedule):
        stripe = 16 / len(shades)
        for index, shade in enumerate(shades):
            left = x + index * stripe
            parts.append(
                f'<rect x="{left:.2f}" y="28" width="{stripe:.2f}" height="12" fill="{shade}"/>'
            )
        parts.append(f'<text x="{x + 20:.2f}" y="38">{name}</text>')
        x += 28 + _LABEL_WIDTH * len(name)
    return parts


def draw_html(svg: str, title: str) -> str:
    """An HTML page with the picture: the wheel zooms time, dragging moves, double click resets."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<style>body{{margin:0;background:#fff}} #view{{overflow-x:auto;cursor:grab}}</style></head>
<body><div id="view">
{svg}</div>
<script>
const view = document.getElementById("view"), svg = view.querySelector("svg");
const width = svg.viewBox.baseVal.width, height = svg.viewBox.baseVal.height;
let zoom = 1, drag = null;
svg.setAttribute("preserveAspectRatio", "none");
function apply() {{ svg.setAttribute("width", width * zoom); svg.setAttribute("height", height); }}
view.addEventListener("wheel", (event) => {{
  event.preventDefault();
  const x = event.clientX + view.scrollLeft, before = zoom;
  zoom = Math.min(60, Math.max(1, zoom * (event.deltaY < 0 ? 1.2 : 1 / 1.2)));
  apply();
  view.scrollLeft = x * zoom / before - event.clientX;
}}, {{passive: false}});
view.addEventListener("mousedown", (event) => {{ drag = event.clientX + view.scrollLeft; }});
addEventListener("mousemove", (event) => {{
  if (drag !== null) view.scrollLeft = drag - event.clientX;
}});
addEventListener("mouseup", () => {{ drag = null; }});
view.addEventListener("dblclick", () => {{ zoom = 1; apply(); }});
</script></body></html>
"""
