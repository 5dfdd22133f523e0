"""A run records one step of its pipeline; `megalite schedule --from-run` shows it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.errors import ScheduleError
from megalite.schedules import build
from megalite.schedules.view.trace import TRACE_FILE, read_trace
from tests.pool import RankPool
from tests.train.kit.runs import make_config, train, write_tokens


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    write_tokens(folder / "data", 16)
    config = make_config(
        folder, "run", "interleaved", pipeline__schedule="zb-v", pipeline__trace_step=2
    )
    outcomes = pool.run(train, 2, [(config, None)])
    assert [outcome[0].code for outcome in outcomes] == [0, 0], outcomes
    return folder / "run"


def test_the_recorded_step_is_the_schedules_and_in_order(run: Path) -> None:
    measured = read_trace(run)
    assert (measured.name, measured.step) == ("zb-v", 2)
    assert measured.schedule == build("zb-v", 2, 2, 4)
    for row in measured.timeline.spans:
        for (_, start, end), (_, later, _) in pairwise(row):
            assert 0 <= start <= end <= later
    durations = measured.durations()
    assert min(*durations.forward, *durations.backward_input, *durations.backward_weight) > 0


def test_the_command_shows_it_beside_the_simulated_one(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["schedule", "--from-run", str(run)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("zb-v, step 2: measured ")
    assert [line.split()[0] for line in lines[1:]] == ["simulated", "0", "1", "measured", "0", "1"]
    asked = CliRunner().invoke(app, ["schedule", "--from-run", str(run), "--json"])
    (one,) = json.loads(asked.output)["schedules"]
    took, step_ms = read_trace(run).timeline.makespan, lines[0].split()[4]
    assert one["recorded"] == {"step": 2, "step_time": pytest.approx(took * 1e3)}
    assert (one["time_unit"], f"{took * 1e3:.1f}") == ("time (ms)", step_ms)
    files = {form: tmp_path / f"a.{form}" for form in ("html", "png")}
    words = [word for form, file in files.items() for word in (f"--{form}", str(file))]
    drawn = CliRunner().invoke(app, ["schedule", "--from-run", str(run), *words])
    assert drawn.exit_code == 0, drawn.output
    page = files["html"].read_text()
    title = "zb-v: 2 ranks x 2 chunks, 4 microbatches; step 2: measured "
    for text in (title, " (median durations), ratio ", ">measured<", ">time (ms)<"):
        assert text in page
    assert files["png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("spoil", ["missing", "torn", "other", "not json"])
def test_what_is_no_recorded_step_is_refused_in_a_line(
    run: Path, tmp_path: Path, spoil: str
) -> None:
    text = (run / TRACE_FILE).read_text()
    spoilt = {
        "torn": text[: len(text) // 2],
        "other": text.replace("F0.1", "F0.0", 1),
        "not json": "[]",
    }
    if spoil != "missing":
        (tmp_path / TRACE_FILE).write_text(spoilt[spoil])
    with pytest.raises(ScheduleError, match=r"pipeline\.json|already done"):
        read_trace(tmp_path)
