"""The losses of runs by step as a picture: training, validation, guessing; below, the rates.

Losses that are not finite are marks at the top edge. One run has a colour per line; several have
one each, and a marker per validation set.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from megalite.record.figure import FONT_PT, new_figure
from megalite.record.report import RunRecord, eval_names, short_count, summary, vocab_size
from megalite.wording import number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Look = dict[str, Any]  # matplotlib's arguments for a line

# Colours of Okabe and Ito, which colour-blind readers tell apart; further runs are dashed.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_RUNS: tuple[_Look, ...] = tuple(
    {"color": colour, "ls": dashes} for dashes in ("-", (0, (4, 1.5))) for colour in _COLOURS
)
_MARKERS = "osD^vPX"
_SHARED: _Look = {"color": "#555555"}  # of what belongs to no run
_EVERY_STEP: _Look = {"lw": 0.7, "alpha": 0.35}
_SMOOTHED: _Look = {"lw": 1.8}
_FEW_STEPS: _Look = {"lw": 1.0, "marker": "."}
_NOT_FINITE: _Look = {"marker": "x", "ls": "", "ms": 5}

_SMOOTHED_FROM = 10  # steps; fewer are drawn as points
_WIDTH, _HEIGHT, _LEGEND_ROW = 8.0, 4.5, 0.17  # inches; the height is without the legend
_LEGEND_WIDTH = 94  # characters in a row


def loss_figure(runs: Mapping[str, RunRecord]) -> Figure:
    """One or more runs, by name, over each other; a strip with learning rates if there are any."""
    figure = new_figure(_WIDTH, 1.0)
    heights = [5, 1] if any(_rates(run) for run in runs.values()) else [1]
    grid = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    panels = list(grid[:, 0])

    # Smoothed alike, so that runs can be compared; the legend says over how many steps.
    longest = max(len(run.steps) for run in runs.values())
    span = min(200, max(5, longest // 25)) if longest >= _SMOOTHED_FROM else None
    looks = dict(zip(runs, cycle(_RUNS), strict=False))
    sets = _evaluation_looks(runs, looks)
    for name, run in runs.items():
        _draw_training(panels[0], run, looks[name], span)
        for kind in eval_names(run):
            points = [(e["step"], e["loss"]) for e in run.evals if e["name"] == kind]
            panels[0].plot(*zip(*points, strict=True), **sets[name, kind])
        if rates := _rates(run):
            few = _FEW_STEPS if span is None else {"lw": 1.2}
            panels[-1].plot(*zip(*rates, strict=True), **{**looks[name], **few})
    for size in sorted({size for run in runs.values() if (size := vocab_size(run))}):
        _draw_guessing(panels[0], size)

    _draw_axes(panels, [step for run in runs.values() for step in run.steps])
    if len(runs) == 1:
        ((name, run),) = runs.items()
        figure.suptitle(f"{name}: {summary(run)[0]}", size=FONT_PT + 1)
    _draw_legend(figure, runs, looks, sets, span)
    return figure


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """The mean around each finite value, weighted by exp(-2 distance / span) to both sides.

    Values that are not finite have no weight and no mean. The first loss is extended by its mirror
    image, or the line would begin below a loss that falls.
    """
    first = next(filter(math.isfinite, values), math.nan)
    mirrored = [2 * first - value for value in values[3 * span : 0 : -1]]
    extended = [*mirrored, *values]

    # A value is in the sums of both sides, so it is taken out once.
    keep = math.exp(-2 / span)
    before, after = _decayed(extended, keep), _decayed(extended[::-1], keep)[::-1]
    means = [
        (sum_b + sum_a - value) / (weight_b + weight_a - 1) if math.isfinite(value) else math.nan
        for value, (sum_b, weight_b), (sum_a, weight_a) in zip(extended, before, after, strict=True)
    ]
    return means[len(mirrored) :]


def _decayed(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """(sum, weight) of the finite values up to each, where each step away counts `keep` times."""
    sums = []
    total = weight = 0.0
    for value in values:
        total, weight = total * keep, weight * keep
        if math.isfinite(value):
            total, weight = total + value, weight + 1.0
        sums.append((total, weight))
    return sums


def _rates(run: RunRecord) -> list[tuple[int, float]]:
    return [(s["step"], float(s["lr"])) for s in run.steps if s.get("lr") is not None]


def _not_finite(run: RunRecord) -> list[int]:
    """The steps whose loss was not finite."""
    return [step["step"] for step in run.steps if not math.isfinite(step["loss"])]


def _evaluation_looks(
    runs: Mapping[str, RunRecord], looks: Mapping[str, _Look]
) -> dict[tuple[str, str], _Look]:
    """The look of each run's points of each set.

    The sets of one run differ by colour and marker; those of several have the colour of their run.
    """
    line = {"ls": "--", "lw": 1, "ms": 5, "mec": "white", "mew": 0.5, "zorder": 3}
    own = zip(eval_names(*runs.values()), cycle(_MARKERS), cycle(_COLOURS[1:]), strict=False)
    return {
        (name, kind): {
            **line,
            "marker": marker,
            "color": look["color"] if len(runs) > 1 else colour,
        }
        for kind, marker, colour in own
        for name, look in looks.items()
    }


def _draw_training(axes: Axes, run: RunRecord, look: _Look, span: int | None) -> None:
    """Every step's loss, pale under its smoothed line; or as points, where there are few."""
    steps, losses = [s["step"] for s in run.steps], [s["loss"] for s in run.steps]
    if span is None:
        axes.plot(steps, losses, **look, **_FEW_STEPS)
    else:
        axes.plot(steps, losses, **look, **_EVERY_STEP)
        axes.plot(steps, smoothed(losses, span), **look, **_SMOOTHED)
    bad = _not_finite(run)
    height = [0.98] * len(bad)  # as a share of the axes
    axes.plot(bad, height, transform=axes.get_xaxis_transform(), **{**look, **_NOT_FINITE})


def _draw_guessing(axes: Axes, size: int) -> None:
    """The loss of uniform guessing, with its text on the line: the legend names runs."""
    loss = math.log(size)
    axes.axhline(loss, ls=":", lw=1, **_SHARED)
    axes.text(
        0.995,
        loss,
        f"guessing among {number_of(size, 'token')}: {loss:.2f}",
        transform=axes.get_yaxis_transform(),
        size=FONT_PT - 1,
        ha="right",
        va="bottom",
        **_SHARED,
    )


def _draw_axes(panels: Sequence[Axes], steps: Sequence[Mapping[str, Any]]) -> None:
    """Names, grids and ticks: steps below, tokens above, rates in the lower panel."""
    from matplotlib.ticker import MaxNLocator

    for axes in panels:
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=FONT_PT)
    upper, lower = panels[0], panels[-1]
    if lower is not upper:
        lower.set_ylabel("learning\nrate", size=FONT_PT)
        lower.locator_params(axis="y", nbins=3)
        lower.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
        lower.set_ylim(bottom=0)
    upper.set_ylabel("loss (nats per token)", size=FONT_PT)
    upper.margins(x=0.02, y=0.08)
    lower.set_xlabel("step", size=FONT_PT)
    places: dict[str, Any] = {"nbins": 8, "steps": [1, 2, 5, 10], "integer": True, "min_n_ticks": 1}
    lower.xaxis.set_major_locator(MaxNLocator(**places))

    # A batch may grow during the run, so ticks lie at steps and name the tokens of each.
    tokens = _tokens_by_step(steps)
    if tokens:
        top = upper.secondary_xaxis("top")
        top.set_xlabel("tokens", size=FONT_PT)
        top.tick_params(labelsize=FONT_PT)
        top.xaxis.set_major_locator(MaxNLocator(**places))
        known = sorted(tokens)
        top.xaxis.set_major_formatter(lambda step, _: _tokens_at(step, known, tokens))


def _tokens_by_step(steps: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The tokens consumed after each step; empty where runs differ in them."""
    tokens = {0: 0}
    for step in steps:
        consumed = step.get("consumed_tokens")
        if consumed is None or tokens.setdefault(step["step"], consumed) != consumed:
            return {}
    return tokens


def _tokens_at(step: float, known: Sequence[int], tokens: Mapping[int, int]) -> str:
    """The text for the tokens at a step, also between known ones; none outside of them."""
    at = bisect_left(known, step)
    if step < 0 or at == len(known):
        return ""
    before, after = known[max(at - 1, 0)], known[at]
    share = (step - before) / (after - before) if after > before else 0.0
    return short_count(round(tokens[before] + share * (tokens[after] - tokens[before])))


def _draw_legend(
    figure: Figure,
    runs: Mapping[str, RunRecord],
    looks: Mapping[str, _Look],
    sets: Mapping[tuple[str, str], _Look],
    span: int | None,
) -> None:
    """Names below the picture, where they cover no line; what all runs have is named once, grey."""
    from matplotlib.lines import Line2D

    several = len(runs) > 1
    shared = _SHARED if several else next(iter(looks.values()))
    entries: list[tuple[str, _Look]] = []
    if several:
        entries += [(name, {**looks[name], **_SMOOTHED}) for name in runs]
    elif span is None:
        entries.append(("training", {**shared, **_FEW_STEPS}))
    if span is not None:
        entries.append(("training, each step", {**shared, **_EVERY_STEP}))
        entries.append(
            (f"smoothed (exponential, span {number_of(span, 'step')})", {**shared, **_SMOOTHED})
        )
    entries += [
        (kind, {**look, **shared, "ls": "--"} if several else look)
        for kind, look in {kind: look for (_, kind), look in sets.items()}.items()
    ]
    if bad := sum(len(_not_finite(run)) for run in runs.values()):
        entries.append((f"not finite (steps: {bad})", {**shared, **_NOT_FINITE}))

    # Entries fill columns; they are handed over such that rows can be read.
    names = [name for name, _ in entries]
    columns = next((n for n in (3, 2) if _row_width(names, n) <= _LEGEND_WIDTH), 1)
    figure.set_figheight(_HEIGHT + _LEGEND_ROW * math.ceil(len(names) / columns))
    rows = [entry for first in range(columns) for entry in entries[first::columns]]
    figure.legend(
        [Line2D([], [], **look) for _, look in rows],
        [name for name, _ in rows],
        loc="outside lower center",
        ncols=columns,
        fontsize=FONT_PT,
        frameon=False,
    )


def _row_width(names: Sequence[str], columns: int) -> int:
    return sum(max(map(len, names[first::columns]), default=0) for first in range(columns))
