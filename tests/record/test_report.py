"""What a person gets from a run: console, log.txt, report, picture, generated text."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console as RichConsole
from typer.testing import CliRunner, Result

from megalite.checks import packages
from megalite.cli.main import app
from megalite.config.load import load_config
from megalite.errors import DataError
from megalite.record.console import Console
from megalite.record.records import TIME_PARTS, MetricsFile
from megalite.record.report import read_run, short_count, summary, time_table
from tests.corpus.kit import prepare
from tests.pool import RankPool
from tests.train.kit.runs import make_config, train, world_size

TOKENIZER_SIZE, MODEL_VOCAB = 290, 400  # a model may have ids that its tokenizer lacks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """A run of three steps at tp 2 on text, with a tokenizer and validation."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "text").mkdir()
    for number in range(4):
        (folder / "text" / f"{number}.txt").write_text("def f(x):\n\treturn x + 1\n" * 60)
    prepare(str(folder / "text"), str(folder / "data"), vocab_size=TOKENIZER_SIZE)
    config = make_config(
        folder,
        "run",
        "tp2",
        model__vocab_size=MODEL_VOCAB,
        data__tokenizer=str(folder / "data.model"),
        data__split=(0.7, 0.3),
        train__steps=3,
        eval__interval=2,
        eval__batches=1,
    )
    pool.run(train, world_size(config), [(config, None)])
    return folder / "run"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.long
def test_report_shows_losses_and_time_and_draws_a_picture(run: Path) -> None:
    result = invoke("report", run)
    assert result.exit_code == 0, result.output
    for text in ("3 steps, ", "training loss", "validation loss", "ln(400) = 5.9915"):
        assert text in result.output
    for part in TIME_PARTS:
        assert f"\n  {part} " in result.output
    picture = (run / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 5000


def write_run(folder: Path, losses: list[float]) -> Path:
    """A run folder of a step per loss."""
    file = MetricsFile(folder / "metrics.jsonl")
    file.write("run", config={"model": {"vocab_size": 97}}, parameters=12_345_678)
    for step, loss in enumerate(losses, start=1):
        file.write("step", step=step, loss=loss, consumed_tokens=5_000 * step)
    file.close()
    return folder


@pytest.mark.long
def test_several_runs_are_a_table_and_one_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_run(tmp_path / "a" / "one", [3.0, 2.0])
    second = write_run(tmp_path / "a" / "another", [3.0, 2.5, 1.25])
    with (second / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step": 3, "loss": 1.5, "attempt": 1}\ndamaged\n')
    monkeypatch.chdir(tmp_path)
    result = invoke("report", first, second)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "run      steps  tokens  parameters  training  validation  ms a step",
        "one          2     10k       12.3M    2.0000         n/a        n/a",
        "another      3     15k       12.3M    1.2500      1.5000        n/a",
        "warning: another: 1 line of metrics.jsonl cannot be used and is left out: line 6",
        "",
        "loss curve: of several runs only with --out FILE",
    ]
    assert not list(tmp_path.rglob("*.png"))

    # Folders of one name are told apart by the folders above; the picture goes where --out says.
    twin = write_run(tmp_path / "b" / "one", [4.0])
    result = invoke("report", "a/one", twin, second, "--out", tmp_path / "c.png")
    names = [line.split()[0] for line in result.output.splitlines()[1:4]]
    assert names == ["a/one", "b/one", "another"]
    assert result.output.splitlines()[-1] == f"loss curve: {tmp_path / 'c.png'}"
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    result = invoke("report", twin, "--out", tmp_path / "gone" / "c.png")
    assert (result.exit_code, result.stderr) == (
        2,
        f"error: {tmp_path / 'gone' / 'c.png'} cannot be written: No such file or directory; "
        "make its folder first\n",
    )

    # A picture is a PNG, and a name that says otherwise is refused before anything is printed.
    result = invoke("report", twin, "--out", tmp_path / "c.svg")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: --out writes a .png file, not .svg: name it {tmp_path / 'c.png'}\n"
    )
    assert not (tmp_path / "c.svg").exists()


def test_json_has_the_figures_of_each_run(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "run", [3.0, 2.0, float("nan")])
    file = MetricsFile(first / "metrics.jsonl")
    times = {f"time_{part}_s": 0.5 if part == "data" else 0.0 for part in TIME_PARTS}
    file.write("step", step=4, loss=1.0, consumed_tokens=20_000, step_time_s=2.0, **times)
    for step, loss in ((2, 2.5), (4, 1.5)):
        file.write("eval", step=step, name="validation", loss=loss)
    file.close()
    second = write_run(tmp_path / "b" / "run", [float("nan")])
    result = invoke("report", first, second, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["loss_curve"] is None
    assert found["runs"][0] == {
        "name": "a/run",
        "path": str(first),
        "steps": 4,
        "consumed_tokens": 20_000,
        "parameters": 12_345_678,
        "loss": {"count": 4, "first": 3.0, "last": 1.0},
        "evaluations": {"validation": {"count": 2, "first": 2.5, "last": 1.5}},
        "vocab_size": 97,
        "guessing_loss": pytest.approx(4.5747, abs=1e-4),
        "attempt": 2,
        "step_time_s": 2.0,
        "time_shares": {part: 0.25 if part == "data" else 0.0 for part in TIME_PARTS},
        "damage": None,
    }
    other = found["runs"][1]
    assert other["loss"] == {"count": 1, "first": "nan", "last": "nan"}
    assert (other["evaluations"], other["step_time_s"], other["time_shares"]) == ({}, None, {})

    # A picture is drawn as without --json, and its path is a value.
    result = invoke("report", second, "--json")
    assert json.loads(result.stdout)["loss_curve"] == str(second / "loss.png")
    assert (second / "loss.png").is_file()


def test_a_run_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [1.0])
    (tmp_path / "link").symlink_to(run)
    for again in (run, tmp_path / "link"):
        result = invoke("report", run, again)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == (f"error: {again} is the same run as {run}; give each run once\n")


def test_a_run_whose_folder_cannot_be_written_has_a_report_without_a_picture(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "run", [1.0])
    (run / "loss.png").mkdir()  # in the way of the picture, for root too
    result = invoke("report", run)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == (
        f"loss curve: {run / 'loss.png'} cannot be written: Is a directory; name a file in it, or "
        "name another place by --out FILE"
    )
    result = invoke("report", run, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["loss_curve"] is None
    assert invoke("report", run, "--out", run / "loss.png").exit_code == 2


def test_all_runs_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [1.0])
    result = invoke("report", tmp_path / "a", run, tmp_path / "b")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"error: {tmp_path / name}/metrics.jsonl does not exist; give the folder of a run that has "
        "trained"
        for name in ("a", "b")
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "n/a"),
        (0, "0"),
        (9_999, "9999"),
        (10_000, "10k"),
        (999_999, "1000k"),
        (1_245_184, "1.25M"),
        (70_553_706_496, "70.6B"),
        (15_000_000_000_000, "15T"),
    ],
)
def test_counts_are_short(count: int | None, text: str) -> None:
    assert short_count(count) == text


def test_report_without_matplotlib_prints_all_but_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda package: False)
    result = invoke("report", write_run(tmp_path, [1.0]))
    assert result.exit_code == 0
    assert "training loss" in result.output
    missing = "needs matplotlib, which is not installed: pip install 'megalite[plots]'"
    assert result.output.splitlines()[-1] == f"loss curve: {missing}"
    refused = invoke("report", tmp_path, "--out", tmp_path / "a.png")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == f"error: --out {missing}\n"
    assert not (tmp_path / "loss.png").exists()


def test_report_of_something_else_is_refused_in_a_line(tmp_path: Path) -> None:
    result = invoke("report", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: {tmp_path / 'metrics.jsonl'} does not exist; give the folder of a run "
        "that has trained\n"
    )
    MetricsFile(tmp_path / "metrics.jsonl").write("run", config={})
    assert "metrics.jsonl has no steps; give" in invoke("report", tmp_path).stderr


def test_report_follows_the_last_attempt_and_stands_losses_that_are_not_finite(
    tmp_path: Path,
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write("run", config={"model": {"vocab_size": 97}}, parameters=1000)
    for step in (1, 2, 3, 4):
        file.write("step", step=step, loss=float(step), consumed_tokens=step)
    file.write("eval", step=4, loss=9.0)
    file.close()
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write("restart", step=2)
    file.write("step", step=3, loss=float("nan"), consumed_tokens=3)
    file.close()
    record = read_run(tmp_path)
    assert [(s["step"], s["attempt"]) for s in record.steps] == [(1, 1), (2, 1), (3, 2)]
    assert record.evals == []
    assert "training loss   1.0000 -> nan" in summary(record)
    assert time_table(record) == ["no step has its time split"]
    with pytest.raises(DataError, match="does not exist"):
        read_run(tmp_path / "gone")


def test_the_time_of_a_step_is_that_of_the_last_attempt_without_its_first_step(
    tmp_path: Path,
) -> None:
    """A run that went on at another layout, or on another machine, has no time of both."""
    times = {f"time_{part}_s": 0.0 for part in TIME_PARTS}
    for attempt, seconds in enumerate((4.0, 1.0), start=1):
        file = MetricsFile(tmp_path / "metrics.jsonl")
        file.write("run" if attempt == 1 else "restart", step=3 * attempt - 3, config={})
        for step in range(3 * attempt - 2, 3 * attempt + 1):
            took = seconds if step % 3 != 1 else 60.0
            split = {**times, "time_data_s": took / 4, "time_other_s": took * 3 / 4}
            file.write("step", step=step, loss=1.0, step_time_s=took, **split)
        file.close()
        title, *rows = time_table(read_run(tmp_path))
        assert title == f"a step took {seconds * 1e3:.0f} ms (median of attempt {attempt}):"
        assert next(row for row in rows if "data " in row).split()[1] == "25.0%"


def test_shares_are_of_the_steps_whose_time_is_split(tmp_path: Path) -> None:
    """On GPUs only the steps with a console line are: the median is of all."""
    times = {f"time_{part}_s": 0.0 for part in TIME_PARTS}
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write("run", step=0, config={})
    for step, took in enumerate((9.0, 1.0, 4.0, 1.0), start=1):
        split = {**times, "time_data_s": 1.0, "time_other_s": 3.0} if step == 3 else {}
        file.write("step", step=step, loss=1.0, step_time_s=took, **split)
    file.close()
    title, *rows = time_table(read_run(tmp_path))
    assert title == "a step took 1000 ms (median of attempt 1):"
    assert next(row for row in rows if "data " in row).split()[1] == "25.0%"


DAMAGED_LINES = [
    b"not json",
    b"[1, 2]",
    b'"step"',
    b'{"no": "kind"}',
    b'{"kind": 3}',
    b'{"kind": "step"}',
    b'{"kind": "step", "step": "4", "loss": 1.0}',
    b'{"kind": "step", "step": 4}',
    b'{"kind": "step", "step": 4, "loss": "low"}',
    b'{"kind": "step", "step": 4, "loss": [1.0]}',
    b'{"kind": "step", "step": 4, "loss": 1.0, "consumed_tokens": "many"}',
    b'{"kind": "step", "step": 4, "loss": 1.0, "time_data_s": {}}',
    b'{"kind": "step", "step": true, "loss": 1.0}',
    b'{"kind": "eval", "step": 4, "loss": {}}',
    b'{"kind": "restart", "step": null}',
    b'{"kind": "step", "step": 4, "loss": 1.0, "attempt": "second"}',
    b"[" * 100_000,
    b"\xff\xfe",
    b'{"kind": "step", "step": 4, "lo',
]


@pytest.mark.long
@pytest.mark.parametrize("line", DAMAGED_LINES, ids=lambda line: line[:60].decode("latin-1"))
def test_a_damaged_line_anywhere_is_left_out_and_told(tmp_path: Path, line: bytes) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write("run", config={"model": {"vocab_size": 97}}, parameters=1000)
    file.write("step", step=1, loss=2.0, consumed_tokens=64)
    file.write("step", step=2, loss=1.0, consumed_tokens=128)
    file.close()
    path = tmp_path / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line, others[0], b"", others[1], line]))
    result = invoke("report", tmp_path)
    assert result.exit_code == 0, result.output
    assert "training loss   2.0000 -> 1.0000" in result.output
    warning = "warning: 2 lines of metrics.jsonl cannot be used and are left out: line 2, 6\n"
    assert warning in result.output


def test_a_run_line_that_says_little_is_enough(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write("run", config={})
    file.write("step", step=1, loss=2.0)
    file.close()
    result = invoke("report", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("1 step, n/a tokens, n/a parameters\n")


def test_the_run_folder_keeps_config_and_console(run: Path) -> None:
    config = load_config(str(run / "config.toml"), []).config
    assert config.name == "run"
    assert config.parallel.tp == 2
    log = (run / "log.txt").read_text().splitlines()
    assert log[0].startswith(f"run {run}: ")
    assert "2 ranks = tp 2 x pp 1 x dp 1" in log[0]
    steps = [line.split("/")[0] + "/3" for line in log if "/3  " in line]
    assert steps == [f"step     {number}/3" for number in (1, 2, 2, 3, 3)]  # two evaluations
    assert f"saved {run / 'checkpoints' / 'step-00000003'} in " in log[-3]
    assert log[-1] == "finished at step 3 of 3"


def test_lines_without_a_terminal_are_plain_and_have_no_bar(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    console = Console()
    long = "x" * 300
    console.print("early [bold]line[/bold]")
    console.open_log(tmp_path / "log.txt")
    with console.progress(0, 10):
        console.advance(3)
        console.print(long)
    console.record("only in the log")
    console.close()
    assert capsys.readouterr().out == f"early [bold]line[/bold]\n{long}\n"
    assert (tmp_path / "log.txt").read_text() == (
        f"early [bold]line[/bold]\n{long}\nonly in the log\n"
    )


def test_a_terminal_gets_a_bar_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console()
    monkeypatch.setattr(
        console, "_rich", RichConsole(file=screen, force_terminal=True, width=100, highlight=False)
    )
    with console.progress(2, 10):
        console.print("a line")
        console.advance(4)
    assert "a line\n" in screen.getvalue()
    assert "training" in screen.getvalue()
    assert "4/10" in screen.getvalue()


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    console = Console(quiet=True)
    console.open_log(tmp_path / "log.txt")
    console.print("a line")
    console.record("another")
    console.close()
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "log.txt").exists()


def test_a_single_loss_is_shown_once(tmp_path: Path) -> None:
    lines = summary(read_run(write_run(tmp_path / "run", [1.5])))
    assert "training loss   1.5000" in lines
