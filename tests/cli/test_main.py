"""The command line: quick, no traceback, exit code 2 with one line for each mistake."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megalite.__main__ import main as command
from megalite.cli.main import app
from megalite.errors import ConfigError, DataError
from tests import ROOT
from tests.data.kit import write_dataset

RUN = """
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
ffn_hidden_size = 64
vocab_size = 97
[data]
seq_length = 16
[train]
steps = 3
global_batch = 4
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(run_with_data(tmp_path))
    return path


def run_with_data(folder: Path) -> str:
    """RUN with a dataset, which is made in the folder."""
    data = write_dataset(folder / "tokens", [list(range(90))] * 9, 97)
    return RUN.replace("[data]", f'[data]\npath = "{data}"')


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands in for the trainer and records what it is called with."""
    calls: list[dict[str, Any]] = []
    launch: Any = types.ModuleType("megalite.train.launch")
    launch.train_command = lambda config, launch, **rest: calls.append(
        {"config": config, "launch": launch, **rest}
    )
    monkeypatch.setitem(sys.modules, "megalite.train.launch", launch)
    return calls


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def megalite_in_python(*arguments: object) -> str:
    """Code that runs the command line and then prints which heavy modules it loaded."""
    return f"""
import sys
sys.argv = ["megalite", *{[str(a) for a in arguments]!r}]
from megalite.cli.main import main
try:
    main()
except SystemExit as stop:
    heavy = [name for name in {["torch", "numpy", "pydantic", "pyarrow"]!r} if name in sys.modules]
    print("EXIT", stop.code, heavy)
"""


def test_help_imports_nothing_heavy() -> None:
    done = python(megalite_in_python("--help"))
    assert done.stdout.splitlines()[-1] == "EXIT 0 []", done.stderr
    for verb in ("train", "data", "version"):
        assert f"\n  {verb} " in done.stdout


def test_drawing_a_schedule_does_not_read_the_schema_of_settings() -> None:
    code = megalite_in_python("schedule", "zb-v", "--pp", 4)
    done = python(
        f"{code}    print('megalite.config.schema' in sys.modules, 'torch' in sys.modules)"
    )
    assert done.stdout.splitlines()[-1] == "False False", done.stderr


def test_config_mistakes_are_answered_without_torch(run_file: Path) -> None:
    done = python(megalite_in_python("train", run_file, "train.lr=1", "parallel.tp=1"))
    assert done.stdout.splitlines()[-1] == "EXIT 2 ['numpy', 'pydantic']", done.stderr
    assert done.stderr == ("error: unknown key train.lr (override); did you mean optimizer.lr?\n")


def test_printing_a_config_imports_no_torch(run_file: Path) -> None:
    done = python(megalite_in_python("train", run_file, "--print-config"))
    assert done.stdout.splitlines()[-1] == "EXIT 0 ['pydantic']", done.stderr


def test_planning_imports_no_torch(run_file: Path) -> None:
    done = python(megalite_in_python("plan", run_file, "--hardware", "h100"))
    assert done.stdout.splitlines()[-1] == "EXIT 0 ['pydantic']", done.stderr


def test_the_installed_command_starts() -> None:
    command = Path(sys.executable).parent / "megalite"
    done = subprocess.run([command, "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("megalite 0.")


@pytest.mark.parametrize("way", ["version", "--version"])
def test_version(way: str) -> None:
    result = invoke(way)
    assert result.exit_code == 0
    assert result.output.startswith("megalite ")


def test_train_hands_over_a_checked_config(run_file: Path, started: list[dict[str, Any]]) -> None:
    result = invoke("train", run_file, "train.steps=7", "--local", "--name", "x1")
    assert result.exit_code == 0, result.output
    (call,) = started
    assert call["local"] is True
    assert call["config"].train.steps == 7
    assert call["config"].name == "x1"


def test_options_may_stand_between_overrides(run_file: Path, started: list[dict[str, Any]]) -> None:
    result = invoke("train", "--local", run_file, "train.steps=7", "--name", "x", "train.seed=5")
    assert result.exit_code == 0, result.output
    assert started[0]["config"].train.seed == 5


def test_print_config_shows_origins_and_does_not_train(
    run_file: Path, started: list[dict[str, Any]]
) -> None:
    result = invoke("train", run_file, "train.steps=7", "--print-config")
    assert result.exit_code == 0
    assert started == []
    rows = {line.split()[0]: line.split()[1:] for line in result.output.splitlines()}
    assert rows["train.steps"] == ["7", "override"]
    assert rows["model.num_layers"] == ["2", str(run_file)]
    assert rows["pipeline.schedule"] == ['"1f1b"', "derived"]
    assert rows["parallel.dp"] == ['"none"', "default"]


def test_print_config_of_a_local_run_knows_dp(run_file: Path) -> None:
    result = invoke("train", run_file, "--local", "--print-config")
    rows = {line.split()[0]: line.split()[1:] for line in result.output.splitlines()}
    assert rows["parallel.dp"] == ["1", "derived"]


def test_every_problem_gets_a_line_and_nothing_starts(
    run_file: Path, started: list[dict[str, Any]]
) -> None:
    result = invoke("train", run_file, "parallel.vpp=2", "train.micro_batch=3", "data.path=gone")
    assert result.exit_code == 2
    assert started == []
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("error: parallel.vpp=2 has no effect with parallel.pp=1")
    assert lines[1].startswith(
        "error: train.global_batch=4 is not divisible by train.micro_batch=3"
    )
    assert lines[2].startswith("error: data.path=gone: no file gone.bin nor gone.idx")


def test_what_is_not_there_is_reported_with_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    given = ["parallel.tp=2", "train.micro_batch=3", "checkpoint.resume=must", f"out={tmp_path}"]
    lines = invoke("train", path, *given).stderr.splitlines()
    assert [line.removeprefix("error: ")[:40] for line in lines] == [
        "train.global_batch=4 is not divisible by",
        "parallel.tp=2 x parallel.pp=1 x parallel",
        "neither data.path nor data.sources is se",
        'checkpoint.resume="must", but ' + str(tmp_path)[:10],
    ]
    assert len(invoke("train", path, *given, "train.steps=x").stderr.splitlines()) == 5


def test_print_config_of_an_invalid_config_fails(run_file: Path) -> None:
    result = invoke("train", run_file, "parallel.vpp=2", "--print-config")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: parallel.vpp=2 has no effect")


def test_print_config_does_not_ask_for_the_data(run_file: Path) -> None:
    assert invoke("train", run_file, "data.path=gone", "--print-config").exit_code == 0


@pytest.mark.parametrize(
    "arguments", [["train"], ["train", "gone.toml"], ["trian"], ["train", "x.toml", "--locl"], []]
)
def test_usage_mistakes_exit_2_without_traceback(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_errors_of_other_parts_are_lines_too(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: object, launch: object, **_: object) -> None:
        raise DataError("the corpus is empty")

    launch: Any = types.ModuleType("megalite.train.launch")
    launch.train_command = fail
    monkeypatch.setitem(sys.modules, "megalite.train.launch", launch)
    result = invoke("train", run_file)
    assert (result.exit_code, result.stderr) == (2, "error: the corpus is empty\n")


def test_our_own_faults_keep_their_traceback(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = types.ModuleType("megalite.train.launch")
    monkeypatch.setitem(sys.modules, "megalite.train.launch", launch)
    result = invoke("train", run_file)
    assert isinstance(result.exception, ImportError)


def test_the_traceback_option_shows_where_an_error_was_raised(run_file: Path) -> None:
    result = invoke("--traceback", "train", run_file, "train.lr=1")
    assert isinstance(result.exception, ConfigError)
    assert "--traceback" not in invoke("--help").output


def test_the_quickstart_config_is_accepted() -> None:
    result = invoke("train", ROOT / "configs" / "quickstart.toml", "--print-config")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "utf-8"},
    ],
)
def test_characters_that_the_console_lacks_are_replaced(
    run_file: Path, variables: dict[str, str]
) -> None:
    """ASCII is taken for a mistake of the environment by click, which writes UTF-8 then."""
    setting = "out=\u0436\u00e4"
    code = f"""
import sys
sys.argv = ["megalite", "train", {str(run_file)!r}, "--print-config", {setting!a}]
from megalite.__main__ import main
main()
"""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = [b"\\u0436\xe4"] if "latin-1" in variables.values() else ["\u0436\u00e4".encode()]
    assert any(text in done.stdout for text in [*shown, b"\\u0436\\xe4"])


@pytest.mark.parametrize("moment", ["typer.main.get_command", "typer.core.TyperGroup.parse_args"])
def test_ctrl_c_before_a_verb_runs_ends_in_a_line(
    moment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While typer builds the commands, and while it reads the first words."""

    def interrupt(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(moment, interrupt)
    monkeypatch.setattr(sys, "argv", ["megalite", "version"])
    with pytest.raises(SystemExit) as ended:
        command()
    assert (ended.value.code, capsys.readouterr().err) == (130, "error: interrupted\n")


def test_ctrl_c_ends_any_verb_in_a_line(tmp_path: Path) -> None:
    """The file of prompts is a pipe that gives nothing, so the verb waits."""
    pipe = tmp_path / "prompts.txt"
    os.mkfifo(pipe)
    # As at a terminal: a suite that was started in the background hands on an ignored Ctrl-C.
    running = subprocess.Popen(
        [sys.executable, "-m", "megalite", "generate", tmp_path, "--prompts", pipe],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline, held = time.monotonic() + 120, -1
    while held < 0:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError):  # nobody reads yet
            held = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=120)
    os.close(held)
    assert (running.returncode, stderr) == (130, "error: interrupted\n")
