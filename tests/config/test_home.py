"""`~` stands for the user's home in every path that a config or a command line names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.config.load import load_config
from megalite.errors import ConfigError
from megalite.schedules import build
from megalite.schedules.csv_form import load_csv, write_csv
from tests.config.test_load import MINIMAL

# every setting that is a path -> how to look at it
PATHS = {
    "out": "out=~/x",
    "data.path": "data.path=~/x",
    "data.tokenizer": "data.tokenizer=~/x",
    "checkpoint.load_weights": "checkpoint.load_weights=~/x",
    "log.hardware": "log.hardware=~/x",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def run_file(home: Path) -> Path:
    path = home / "run.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("name", PATHS)
def test_settings_that_are_paths(run_file: Path, home: Path, name: str) -> None:
    config: Any = load_config("~/run.toml", [PATHS[name]]).config
    for part in name.split("."):
        config = getattr(config, part)
    assert config == f"{home}/x"


def test_paths_inside_tables(run_file: Path, home: Path) -> None:
    run_file.write_text(
        MINIMAL + '[[data.sources]]\npath = "~/a"\n[[eval.sets]]\nname = "b"\npath = "~/b"\n'
    )
    config = load_config(run_file).config
    assert (config.data.sources[0].path, config.eval.sets[0].path) == (f"{home}/a", f"{home}/b")


def test_a_base(run_file: Path, home: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text('base = "~/run.toml"\n')
    loaded = load_config(path)
    assert loaded.origins["train.steps"] == f"base {run_file}"


def test_a_schedule_file(home: Path) -> None:
    (home / "a.csv").write_text(write_csv(build("1f1b", 2, 1, 2)))
    assert load_csv("~/a.csv").p == 2


def test_another_users_home_that_is_not_there_is_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="names no user's home; write the whole path"):
        load_config(run_file, ["out=~nobody-of-this-name/runs"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "~/gone"),
        ("plan", "~/gone"),
        ("plan", "RUN", "--hardware=~/gone.toml"),
        ("schedule", "--config=~/gone"),
        ("schedule", "--from-run=~/gone"),
        ("schedule", "file:~/gone"),
        *(("schedule", "1f1b", f"--{kind}=~/gone/a") for kind in ("csv", "svg", "html", "trace")),
        ("schedule", "1f1b", "--png=~/gone/a"),
        ("report", "~/gone"),
        ("info", "~/gone"),
        ("generate", "~/gone"),
        ("generate", ".", "--prompts=~/gone"),
        ("data", "inspect", "~/gone"),
        ("data", "merge", "~/gone", "--out=~/out"),
        ("data", "prepare", "~/gone", "--out=~/out", "--vocab-size=300"),
        ("data", "prepare", "builtin", "--out=~/out", "--tokenizer=~/gone"),
        ("data", "tokenizer", "~/gone", "--out=~/out", "--vocab-size=300"),
    ],
)
def test_paths_of_every_verb(run_file: Path, home: Path, arguments: tuple[str, ...]) -> None:
    """Also where the shell leaves the sign, as after "=": the message names the whole path."""
    given = [str(run_file) if argument == "RUN" else argument for argument in arguments]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2, result.output
    assert f"{home}/gone" in result.stderr


def test_what_is_made_lies_in_the_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    assert CliRunner().invoke(app, ["schedule", "1f1b", "--csv=~/a.csv"]).exit_code == 0
    CliRunner().invoke(app, ["doctor", "--out=~/runs"])
    assert [path.name for path in home.iterdir()] == ["a.csv"]
