"""The PNG of a schedule: panels, boxes, labels, memory, legend, axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.cli.schedule_png import schedule_figure
from megalite.errors import MegaliteError
from megalite.record.figure import new_figure, save
from megalite.schedules import Durations, build, recompute, simulate
from megalite.schedules.view.style import Unit

pytestmark = pytest.mark.long  # matplotlib takes a second to import

FORWARDS = Unit("time (1 = a forward)")


def figure_of(name: str, p: int, v: int, m: int, again: bool = False) -> Any:
    schedule = recompute(build(name, p, v, m)) if again else build(name, p, v, m)
    line = simulate(schedule, Durations.even(p, v))
    return schedule_figure(schedule, line, "a; b", unit=FORWARDS)


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_lane_has_boxes_with_labels_memory_and_its_peak() -> None:
    figure = figure_of("zb-v", 4, 2, 8)
    (axes,) = figure.axes
    boxes, memory = axes.collections[:4], axes.collections[4:]
    assert [len(lane.get_paths()) for lane in boxes] == [48] * 4
    assert len(memory) == 4
    texts = [text.get_text() for text in axes.texts]
    assert texts[:4] == ["4"] * 4
    assert len(texts[4:]) == 4 * 48
    assert {"f0", "F7", "b0", "W7"} <= set(texts[4:])
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [f"rank {i}" for i in range(4)]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # rank 0 at the top
    assert axes.get_xlabel() == FORWARDS.text
    assert figure.get_suptitle() == "a\nb"
    assert legend_of(figure) == [
        "forward (F)",
        "input gradient (B)",
        "weight gradient (W)",
        "activations held, in microbatches (peak: right)",
    ]


def test_labels_fit_their_boxes_and_those_of_a_wide_schedule_are_left_out() -> None:
    figure = figure_of("1f1b", 4, 1, 12)
    renderer = figure.canvas.get_renderer()
    (axes,) = figure.axes
    boxes = [
        path.get_extents(axes.transData)
        for lane in axes.collections[:4]
        for path in lane.get_paths()
    ]
    labels = axes.texts[4:]
    assert len(labels) == len(boxes) - 8
    assert {"F9", "D11"} <= {label.get_text() for label in labels}  # F10 and F11 do not fit
    for label in labels:
        extent = label.get_window_extent(renderer)
        assert any(box.x0 <= extent.x0 and extent.x1 <= box.x1 for box in boxes), label.get_text()

    wide = figure_of("interleaved", 16, 2, 64).axes[0]
    assert len(wide.texts) == 16  # the peaks
    assert all(lane.get_linewidth()[0] == 0 for lane in wide.collections[:16])


def test_recomputation_and_full_backwards_are_in_the_legend() -> None:
    assert legend_of(figure_of("1f1b", 2, 1, 4, again=True))[:3] == [
        "forward (F)",
        "full backward (D)",
        "recompute (R)",
    ]


def test_a_measured_step_is_a_second_panel_at_the_same_scale() -> None:
    schedule = build("1f1b", 2, 1, 4)
    line = simulate(schedule, Durations.even(2, 1, f=0.010, b=0.010, w=0.010))
    slower = simulate(schedule, Durations.even(2, 1, f=0.015, b=0.010, w=0.010))
    figure = schedule_figure(schedule, line, "t", unit=Unit("time (ms)", 1e3), measured=slower)
    upper, lower = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["simulated", "measured"]
    assert upper.get_xlim() == lower.get_xlim()
    assert upper.get_xlim() == pytest.approx((0.0, 1e3 * slower.makespan))
    ends = [
        max(path.get_extents().x1 for lane in axes.collections[:2] for path in lane.get_paths())
        for axes in figure.axes
    ]
    assert ends == pytest.approx([1e3 * line.makespan, 1e3 * slower.makespan])
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("", "time (ms)")


def test_a_file_that_cannot_be_written_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(MegaliteError, match=r"gone/a\.png cannot be written: No such file"):
        save(new_figure(1, 1), tmp_path / "gone" / "a.png")


def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save(figure_of("1f1b", 2, 1, 2), tmp_path / name)
    first = (tmp_path / "a.png").read_bytes()
    assert first == (tmp_path / "b.png").read_bytes()
    assert b"Software" not in first
