"""Schedules as CSV, text pictures, SVG, HTML and traces; the tuner; the command."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.errors import ScheduleError
from megalite.schedules import NAMES, Durations, build, check_schedule, recompute, simulate
from megalite.schedules.action import Action, Schedule
from megalite.schedules.catalogue import SCHEDULES
from megalite.schedules.csv_form import read_csv, read_file, write_csv
from megalite.schedules.memory import peak_deferred
from megalite.schedules.simulate import Timeline
from megalite.schedules.tune import (
    candidate_names,
    default_name,
    peak_activations,
    peak_activations_of_1f1b,
    tune,
)
from megalite.schedules.view.draw_svg import draw_html, draw_svg
from megalite.schedules.view.draw_text import draw_text, plain
from megalite.schedules.view.style import STYLES, Unit
from megalite.schedules.view.trace import chrome_trace
from tests import ROOT

MS = Unit("time (ms)", 1e3)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", NAMES)
def test_csv_reads_back(name: str) -> None:
    v = 2 if SCHEDULES[name].chunks.allows(2) else 1
    schedule = build(name, 3, v, 7)
    assert read_csv(write_csv(schedule)) == schedule


def test_csv_of_torch_with_idle_cells_and_overlapped_pairs() -> None:
    text = "0F0,,0F1,0I0,(0F2;0I1)OVERLAP_F_B,0W0,0W1,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2\n"
    schedule = read_csv(text)
    assert (schedule.p, schedule.v, schedule.m, schedule.place) == (2, 1, 3, (0, 1))
    assert str(schedule).splitlines()[1] == "0: F0.0 F0.1 B0.0 F0.2 B0.1 W0.0 W0.1 BW0.2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0X0\n", "line 1, cell 2: '0X0' is no action; expected STAGE KIND MICROBATCH"),
        ("0F0,0SEND_F0\n", "cell 2: '0SEND_F0' is no action"),
        ("0F0,0B0\n0F1\n", "line 2, cell 1: stage 0 stands in line 1 too"),
        ("1F0,1B0\n", "the stages are [1]; they must be 0, 1, 2"),
        ("", "the stages are []"),
        ("0F0,,0F0,0B0\n", "line 1, cell 3: rank 0, index 1, action F0.0: F0.0 was already"),
        ("\n0F0\n", "line 2, end: rank 0, index 1, action B0.0: it is missing from the list"),
        ("0B0,0F0\n", "line 1, cell 1: rank 0, index 0, action BW0.0: F0.0 must come before it"),
        ("0F0,0B0\n\n\n1F0,1C0\n", "line 4, cell 2: '1C0' is no action"),
        ("0F0,0B0,2F0,2B0\n1F0,1B0\n", "line 2: number of stages is 1, but 2 in line 1"),
        ("0F0,0B0,0F999999999\n", "line 1, cell 3: microbatch 999999999 in a file of 3 actions"),
        ("0F" + 5000 * "1", "line 1, cell 1: '0F11111111111111111111111111111111111...' is no"),
        ("0F0," + 140_000 * "1", "line 1: not comma-separated text (field larger than"),
    ],
    ids=lambda value: value[:20],
)
def test_a_wrong_csv_is_refused_where_it_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        read_csv(text)
    assert words in str(refused.value)


def test_a_file_must_fit_the_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(write_csv(build("zb-h1", 2, 1, 4)))
    assert read_file(str(path), 2, 1, 4) == build("zb-h1", 2, 1, 4)
    with pytest.raises(ScheduleError, match=r"is for p=2 v=1 m=4, the run has p=2 v=1 m=8"):
        read_file(str(path), 2, 1, 8)
    with pytest.raises(ScheduleError, match=r"none\.csv: cannot be read: no such file below "):
        read_file(str(tmp_path / "none.csv"), 2, 1, 4)


def test_pictures_in_text() -> None:
    assert picture("1f1b", 4, 1, 4) == [
        "0 F0 F1 F2 F3 .  .  .  .  .  .  D0 -- .  D1 -- .  D2 -- .  D3 --",
        "1 .  F0 F1 F2 .  .  .  .  D0 -- F3 D1 -- .  D2 -- .  D3 -- .  .",
        "2 .  .  F0 F1 .  .  D0 -- F2 D1 -- F3 D2 -- .  D3 -- .  .  .  .",
        "3 .  .  .  F0 D0 -- F1 D1 -- F2 D2 -- F3 D3 -- .  .  .  .  .  .",
    ]
    assert picture("zb-h1", 4, 1, 6) == [
        "0 F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5",
        "1 .  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5",
        "2 .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5",
        "3 .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5",
    ]
    assert picture("interleaved-zb", 2, 2, 4) == [
        "0 f0 f1 F0 F1 .  B0 W0 f2 B1 W1 f3 b0 w0 F2 b1 w1 F3 B2 W2 B3 W3 b2 w2 b3 w3",
        "1 .  f0 f1 F0 B0 F1 B1 W0 f2 b0 W1 f3 b1 w0 F2 B2 w1 F3 B3 W2 b2 W3 b3 w2 w3",
    ]
    assert picture("gpipe", 2, 3, 1)[0].split()[:3] == ["0", "F0a", "."]


def picture(name: str, p: int, v: int, m: int) -> list[str]:
    schedule = build(name, p, v, m)
    return plain(draw_text(schedule, simulate(schedule, Durations.even(p, v))))


def test_a_picture_that_would_be_too_wide_is_refused_with_the_way_out() -> None:
    schedule = build("1f1b", 2, 1, 800)
    line = simulate(schedule, Durations.even(2, 1))
    with pytest.raises(ScheduleError, match=r"2403 columns wide.*longer unit \(this one is 1\)"):
        draw_text(schedule, line)
    assert len(draw_text(schedule, line, 3.0)[0]) == 801


def test_svg_has_a_box_with_a_tooltip_for_every_action() -> None:
    schedule = build("zb-v", 4, 2, 8)
    line = simulate(schedule, Durations.even(4, 2, hop=0.1))
    root = ElementTree.fromstring(draw_svg(schedule, line, "a < b", unit=MS, measured=line))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    boxes = [t for t in titles if t and "microbatch" in t]
    assert len(boxes) == 2 * sum(map(len, schedule.ranks))
    assert boxes[0] == "forward of stage 0, microbatch 0: 0 to 0.5; the rank holds 0.5"
    assert sum(t is not None and t.startswith("held by this rank; at most 4") for t in titles) == 4
    again = recompute(schedule)
    assert "recompute (R)" in draw_svg(again, simulate(again, Durations.even(4, 2)), "t", unit=MS)
    page = draw_html(draw_svg(schedule, line, "t", unit=MS), "t")
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched


def test_the_names_of_every_kind_lie_side_by_side_and_inside_the_picture() -> None:
    kinds = [Action(kind, 0, 0) for kind in STYLES]
    schedule = Schedule(1, (0,), (tuple(kinds),))
    line = Timeline(schedule.ranks, ([0.0, 1, 2, 3, 4],), ([1.0, 2, 3, 4, 5],))
    root = ElementTree.fromstring(draw_svg(schedule, line, "t", unit=MS))
    names = [text for text in root.iter(f"{SVG}text") if text.get("y") == "38"]
    starts = [float(text.get("x", "nan")) for text in names]
    letter = 7.25  # pixels of a monospace letter of 12
    ends = [
        start + letter * len(text.text or "") for start, text in zip(starts, names, strict=True)
    ]
    assert [text.text for text in names] == [
        "forward (F)",
        "input gradient (B)",
        "weight gradient (W)",
        "full backward (D)",
        "recompute (R)",
        "activations from R on, in microbatches (peak: right)",
    ]
    assert all(end < start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] < float(root.get("width", "nan"))


def test_the_axis_has_its_unit_and_ticks_at_round_values_of_it() -> None:
    schedule = build("1f1b", 2, 1, 2)
    line = simulate(schedule, Durations.even(2, 1, f=0.01, b=0.01, w=0.01))
    root = ElementTree.fromstring(draw_svg(schedule, line, "t", unit=MS))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[-1] == "time (ms)"
    assert texts[-11:-1] == [str(10 * i) for i in range(10)]


def test_trace_has_every_action_once_per_lane() -> None:
    schedule = build("interleaved", 2, 2, 4)
    line = simulate(schedule, Durations.even(2, 2))
    events = json.loads(chrome_trace(schedule, line, measured=line))["traceEvents"]
    actions = [e for e in events if e["ph"] == "X"]
    assert len(actions) == 2 * 2 * 2 * 2 * 4
    assert {e["tid"] for e in actions} == {0, 1}
    assert max(e["ts"] + e["dur"] for e in actions) == pytest.approx(1000 * line.makespan)


# --- the tuner -----------------------------------------------------------------------------------


def test_the_tuner_stays_within_the_memory_and_prefers_lean_among_equals() -> None:
    times = Durations.even(4, 2, b=1.1, w=0.9, hop=0.02)
    for memory in (3.0, 4.0, 5.0, 6.0):
        ranked = tune(4, 2, 16, times, memory)
        assert all(one.peak_activations <= memory for one in ranked)
        steps = [one.step for one in ranked]
        assert steps[0] <= 1.0011 * min(steps)
        best = build(ranked[0].name, 4, 2, 16)
        assert peak_activations(best) == ranked[0].peak_activations
        assert simulate(best, times).makespan == ranked[0].step
    assert tune(4, 2, 16, times, 6.0)[0].step <= tune(4, 2, 16, times, 3.0)[0].step


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 4), (4, 1, 16), (4, 2, 9), (3, 2, 6)])
def test_a_fused_choice_puts_no_weight_gradient_off(p: int, v: int, m: int) -> None:
    ranked = tune(p, v, m, fused=True)
    assert all(not any(peak_deferred(build(one.name, p, v, m))) for one in ranked)
    free = tune(p, v, m)
    assert free[0].step <= ranked[0].step
    assert len(ranked) < len(free)


@pytest.mark.long
def test_the_tuner_beats_1f1b_by_what_is_published() -> None:
    """F:B:W = 1:1.1:0.9 at p=8, m=32, c=0.02: 18.9 % bubble become about 3.2 %."""
    best = tune(8, 4, 32, Durations.even(8, 4, b=1.1, w=0.9, hop=0.02))[0]
    plain = simulate(build("1f1b", 8, 1, 32), Durations.even(8, 1, b=1.1, w=0.9, hop=0.02))
    assert plain.bubble_fraction == pytest.approx(0.189, abs=0.001)
    assert best.bubble_fraction < 0.034


def test_too_little_memory_is_refused_with_what_it_takes() -> None:
    with pytest.raises(
        ScheduleError, match=r"holds at most 1 activations a rank; the leanest holds"
    ):
        tune(4, 1, 8, None, 1.0)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_the_default_is_the_best_looped_name_at_the_memory_of_1f1b(p: int, v: int, m: int) -> None:
    name = default_name(p, v, m)
    schedule = build(name, p, v, m)
    check_schedule(schedule)
    step = simulate(schedule, Durations.even(p, v)).makespan
    for other in candidate_names(p, v, m):
        if other in SCHEDULES and not SCHEDULES[other].v_shaped:
            rival = build(other, p, v, m)
            if peak_activations(rival) <= peak_activations_of_1f1b(p, v, m):
                assert step <= simulate(rival, Durations.even(p, v)).makespan + 1e-9, other


# --- the command ---------------------------------------------------------------------------------


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["schedule", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_draws() -> None:
    lines = run("zb-h1", "--pp", "4", "--microbatches", "6").splitlines()
    assert lines[0] == (
        "zb-h1: 4 ranks x 1 chunk, 6 microbatches; step 21, bubble 14.3%, activations of at most "
        "4 microbatches a rank"
    )
    assert lines[1:] == picture("zb-h1", 4, 1, 6)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "gpipe"])
@pytest.mark.parametrize("more", [(), ("--recompute",)])
def test_the_title_and_the_lanes_have_the_same_peak(
    tmp_path: Path, name: str, more: tuple[str, ...]
) -> None:
    run(name, *more, "--svg", str(tmp_path / "a.svg"))
    drawn = ElementTree.parse(tmp_path / "a.svg")
    texts = [text.text or "" for text in drawn.iter(f"{SVG}text")]
    (title,) = (text for text in texts if text.startswith(f"{name}: "))
    lanes = [note.text or "" for note in drawn.iter(f"{SVG}title")]
    most = max(float(note.rpartition(" ")[2]) for note in lanes if note.startswith("held by"))
    counted = f"{most:g} microbatch" if most == 1 else f"{most:g} microbatches"
    assert f"activations of at most {counted} a rank" in title
    start = "from R on" if more else "held"
    assert f"activations {start}, in microbatches (peak: right)" in texts


def test_json_has_the_values_of_the_picture_and_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    found = json.loads(run("zb-h1", "--microbatches", "6", "--json", "--csv", str(path)))
    assert found["files"] == {"csv": str(path)}
    (one,) = found["schedules"]
    assert one == {
        "name": "zb-h1",
        "pp": 4,
        "chunks": 1,
        "microbatches": 6,
        "time_unit": "time (1 = a rank's forward of one microbatch)",
        "step_time": 21.0,
        "bubble_fraction": pytest.approx(3 / 21),
        "span_bubble": 3.0,
        "peak_activations": 4.0,
        "peak_deferred": 4.0,
        "messages": 36,
        "bubble_formula": "(p-1) max(F, B, F+B-W)",
        "pipeline_ranks": [
            {"busy_time": 18.0, "peak_activations": 4.0, "peak_deferred": float(rank + 1)}
            for rank in range(4)
        ],
    }
    assert read_csv(path.read_text()) == build("zb-h1", 4, 1, 6)
    both = json.loads(run("1f1b", "family:f=1", "--json"))["schedules"]
    assert [(one["name"], one["bubble_formula"]) for one in both] == [
        ("1f1b", "(p-1)(F+B+W)"),
        ("family:f=1", ""),
    ]
    assert run("family:f=1", "--compare").endswith(" 48\n")  # no formula, no word in its place
    listed = json.loads(run("--json"))["catalogue"]
    assert [one["name"] for one in listed] == list(SCHEDULES)
    assert listed[0].keys() == {"name", "chunks", "bubble", "memory", "summary"}


def test_the_command_lists_and_compares() -> None:
    listed = run()
    assert all(name in listed for name in NAMES)
    table = run("1f1b", "zb-h1", "interleaved-zb", "zb-v", "--compare", "--microbatches", "16")
    rows = [line.split() for line in table.splitlines()]
    assert [row[0] for row in rows] == ["schedule", "1f1b", "zb-h1", "interleaved-zb", "zb-v"]
    assert [row[3] for row in rows[1:]] == ["15.8%", "5.9%", "3.0%", "3.0%"]
    assert [row[7] for row in rows[1:]] == ["96", "96", "224", "192"]


@pytest.mark.long
def test_the_command_writes_every_form(tmp_path: Path) -> None:
    names = {form: tmp_path / f"a.{form}" for form in ("svg", "html", "png", "trace", "csv")}
    run("zb-v", *(word for form, path in names.items() for word in (f"--{form}", str(path))))
    assert names["png"].read_bytes()[:4] == b"\x89PNG"
    assert read_csv(names["csv"].read_text()) == build("zb-v", 4, 2, 8)
    for form in ("svg", "html", "trace"):
        assert names[form].stat().st_size > 1000
    again = run(f"file:{names['csv']}", "--chunks", "2")
    assert again.splitlines()[1:] == picture("zb-v", 4, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["zb-w"], "schedule 'zb-w' is unknown (did you mean zb-v?)"),
        (["1f1b", "--chunks", "2"], "1f1b needs v = 1 (chunks per rank), got v=2"),
        (["1f1b", "--unit", "0"], "unit=0 must be > 0"),
        (["1f1b", "--stages", "2"], "--stages is no option; write --pp N for N pipeline ranks"),
        (["1f1b", "zb-h1", "--svg", "x.svg"], "files are written for one schedule at a time"),
        (["1f1b", "--svg", "/nowhere/x.svg"], "/nowhere/x.svg cannot be written"),
        (["1f1b", "--svg", "x.png"], "--svg writes a .svg file, not .png: name it x.svg"),
        (["1f1b", "--html", "x.CSV"], "--html writes a .html file, not .CSV: name it x.html"),
        (["file:/nowhere.csv"], "/nowhere.csv: cannot be read"),
    ],
)
def test_the_command_refuses_in_a_line(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["schedule", *arguments])
    assert done.exit_code == 2
    assert re.search(re.escape(words), done.output)


def test_the_command_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from megalite.cli.main import app\n"
        "try: app(['schedule', 'auto', '--chunks', '2'])\n"
        "except SystemExit as leaving: assert not leaving.code\n"
        "print(sorted({'torch', 'numpy', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_table_of_the_document_is_what_its_command_gives() -> None:
    text = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^megalite schedule (--compare .+ --comm .+)$", text, re.MULTILINE)
    assert run(*command.split()) in text
