"""The picture of losses: its lines, their data, legend, axes; records that are short or broken."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megalite.record.loss_figure import loss_figure, smoothed
from megalite.record.report import RunRecord

pytestmark = pytest.mark.long  # matplotlib takes a second to import

NAN = math.nan


def record(
    losses: list[float],
    evals: dict[str, dict[int, float]] | None = None,
    vocab: int = 512,
    tokens: int = 1000,
    lr: float | None = 1e-3,
) -> RunRecord:
    """A run of a step per loss, with evaluations by name and step."""
    steps: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "consumed_tokens": tokens * step, "lr": lr}
        for step, loss in enumerate(losses, start=1)
    ]
    lines = [
        {"name": name, "step": step, "loss": loss}
        for name, points in (evals or {}).items()
        for step, loss in points.items()
    ]
    head = {"config": {"model": {"vocab_size": vocab}}, "parameters": 1_250_000}
    return RunRecord(head, steps, lines, None)


def drawn(runs: dict[str, RunRecord]) -> Any:
    """The figure of runs, laid out."""
    figure = loss_figure(runs)
    figure.draw_without_rendering()
    return figure


def falling(num_steps: int) -> list[float]:
    return [2 + 4 / (1 + step / 20) + 0.1 * (-1) ** step for step in range(num_steps)]


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def ticks_above(figure: Any) -> list[str]:
    """Texts of the axis of tokens, inside the picture; empty without one."""
    axes = figure.axes[0]
    left, right = axes.get_xlim()
    return [
        label.get_text()
        for above in axes.child_axes
        for label in above.get_xticklabels()
        if left <= label.get_position()[0] <= right
    ]


def test_a_run_has_its_losses_smoothed_its_sets_guessing_and_rates() -> None:
    losses = falling(100)
    evals = {"validation/web": {50: 3.5, 100: 3.0}, "validation/code": {100: 2.0}}
    figure = drawn({"mine": record(losses, evals)})
    upper, lower = figure.axes
    each, mean, _, web, code, guessing = upper.get_lines()
    assert list(each.get_xdata()) == list(range(1, 101))
    assert list(each.get_ydata()) == losses
    assert each.get_alpha() < 0.5 < 1 < mean.get_linewidth()
    assert list(mean.get_ydata()) == smoothed(losses, 5)
    assert (list(web.get_xdata()), list(web.get_ydata())) == ([50, 100], [3.5, 3.0])
    assert len({line.get_color() for line in (mean, web, code)}) == 3
    assert web.get_marker() != code.get_marker()
    assert list(guessing.get_ydata()) == [math.log(512)] * 2
    assert upper.texts[0].get_text() == "guessing among 512 tokens: 6.24"
    assert list(lower.get_lines()[0].get_ydata()) == [1e-3] * 100
    assert lower.get_ylim()[0] == 0
    assert (upper.get_ylabel(), lower.get_xlabel()) == ("loss (nats per token)", "step")
    assert figure.get_suptitle() == "mine: 100 steps, 100k tokens, 1.25M parameters"
    assert legend_of(figure) == [  # of three columns, the first has two entries
        "training, each step",
        "validation/code",
        "smoothed (exponential, span 5 steps)",
        "validation/web",
    ]
    assert ticks_above(figure) == ["0", "20k", "40k", "60k", "80k", "100k"]


def test_several_runs_have_a_colour_each_and_share_the_smoothing() -> None:
    runs = {
        f"run {number}": record(falling(50 * number), {"validation": {40: 3.0 + number}})
        for number in range(1, 10)
    }
    figure = drawn(runs)
    lines = figure.axes[0].get_lines()
    strong = [line for line in lines if line.get_linewidth() == 1.8]
    looks = [(line.get_color(), line.get_linestyle()) for line in strong]
    assert len(set(looks)) == len(runs)
    assert [line.get_color() for line in figure.axes[1].get_lines()] == [look[0] for look in looks]
    points = [line for line in lines if line.get_marker() == "o"]
    assert [line.get_color() for line in points] == [look[0] for look in looks]
    names = legend_of(figure)
    assert set(names) == {
        *runs,
        "training, each step",
        "validation",
        "smoothed (exponential, span 18 steps)",
    }
    assert len(names) == len(set(names))
    assert len(figure.axes[0].texts) == 1  # guessing, the same for all
    assert figure.get_suptitle() == ""


def test_tokens_stand_above_only_where_all_runs_have_the_same() -> None:
    runs = {"a": record([3.0] * 40), "b": record([3.0] * 20)}
    assert ticks_above(drawn(runs))[-1] == "40k"
    assert ticks_above(drawn({**runs, "c": record([3.0] * 20, tokens=2000)})) == []
    without = record([3.0] * 3)
    del without.steps[1]["consumed_tokens"]
    assert ticks_above(drawn({"a": without})) == []


def test_one_step_is_a_point_at_a_whole_step() -> None:
    figure = drawn({"short": record([6.5], {"validation": {1: 6.0}})})
    upper, lower = figure.axes
    line, _, point, _ = upper.get_lines()
    assert (list(line.get_ydata()), line.get_marker()) == ([6.5], ".")
    assert list(point.get_ydata()) == [6.0]
    assert lower.get_lines()[0].get_marker() == "."
    assert legend_of(figure) == ["training", "validation"]
    assert ticks_above(figure) == ["1000"]


def test_losses_that_are_not_finite_are_marks_and_leave_a_gap() -> None:
    losses = falling(30)
    losses[10], losses[20], losses[21] = NAN, math.inf, -math.inf
    figure = drawn({"broken": record(losses)})
    _, mean, marks, _ = figure.axes[0].get_lines()
    assert list(marks.get_xdata()) == [11, 21, 22]
    means = list(mean.get_ydata())
    assert [step for step, loss in enumerate(means) if not math.isfinite(loss)] == [10, 20, 21]
    assert max(loss for loss in means if math.isfinite(loss)) < 7
    assert "not finite (steps: 3)" in legend_of(figure)
    none = drawn({"lost": record([NAN] * 12)})
    assert "not finite (steps: 12)" in legend_of(none)


def test_a_record_without_rates_has_no_strip() -> None:
    assert len(drawn({"old": record([3.0, 2.0], lr=None)}).axes) == 1


def test_smoothing_keeps_a_line_follows_the_first_loss_and_leaves_damage_out() -> None:
    line = [5.0 - 0.1 * step for step in range(200)]
    assert smoothed(line, 10)[:150] == pytest.approx(line[:150], abs=0.01)
    assert smoothed([3.0] * 50, 10) == pytest.approx([3.0] * 50)
    spike = smoothed([0.0] * 20 + [1.0] + [0.0] * 20, 10)
    assert spike == pytest.approx(spike[::-1], abs=0.01)
    assert spike[20] == pytest.approx(math.tanh(0.1), rel=0.02)  # of both geometric sums
    assert spike[25] / spike[20] == pytest.approx(math.exp(-1), rel=0.02)
    damaged = smoothed([2.0, NAN, 2.0, math.inf], 5)
    assert damaged[0] == damaged[2] == pytest.approx(2.0)
    assert math.isnan(damaged[1])
    assert math.isnan(damaged[3])
    assert smoothed([], 5) == []


@pytest.mark.parametrize("length", [1, 35, 80])
def test_the_legend_lies_inside_the_picture(length: int) -> None:
    figure = drawn({f"{'e' * length} {number}": record([2.0] * 12) for number in range(7)})
    extent = figure.legends[0].get_window_extent()
    assert extent.x0 >= 0
    assert extent.x1 <= figure.bbox.width
    assert figure.axes[0].get_window_extent().height > 250  # the legend takes no room from it
