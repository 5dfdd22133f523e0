"""`megalite configs`, and a run that makes its own data."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megalite.cli.main import app
from megalite.config.shipped import shipped_configs


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_the_list_has_every_config_with_its_line() -> None:
    lines = invoke("configs").output.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        "runs (megalite train NAME)",
        'models (base = "NAME" in a run of your own)',
        "hardware (megalite plan CONFIG --hardware NAME)",
    ]
    rows = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    assert rows == [[one.name, one.summary] for one in shipped_configs().values()]


def test_a_name_prints_the_file() -> None:
    done = invoke("configs", "quickstart")
    assert done.stdout == shipped_configs()["quickstart"].path.read_text(encoding="utf-8")


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    done = invoke("configs", "qwickstart")
    assert done.exit_code == 2
    assert done.stderr == (
        "error: no config of the name qwickstart comes with megalite; did you mean quickstart?\n"
    )
    assert "`megalite configs` lists them" in invoke("configs", "zzz").stderr


def test_missing_data_is_an_error_with_its_command_where_others_start_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("train", "quickstart")
    assert done.exit_code == 2
    assert (
        "make it with `megalite data prepare builtin --vocab-size=512 --max-bytes=8000000 --out "
        "data/quickstart/builtin`" in done.stderr
    )
    assert not list(tmp_path.iterdir())


def test_data_is_made_only_for_a_run_without_other_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(
        "train", "quickstart", "--local", "parallel.tp=3", "eval.sets=[{name='x',path='gone'}]"
    )
    assert done.exit_code == 2
    assert "parallel.tp=3" in done.stderr
    assert "eval.sets[0].path=gone: no file" in done.stderr
    assert "data.path" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('data.prepare=["builtin", "--out=x"]', "data.prepare names --out, which is data.path"),
        ('data.prepare=["nowhere", "--vocab-size=512"]', "nowhere"),
    ],
)
def test_what_cannot_be_prepared_is_refused(tmp_path: Path, setting: str, message: str) -> None:
    command = [sys.executable, "-P", "-m", "megalite", "train", "quickstart", "--local", setting]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_signal_while_data_is_made_ends_both_and_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "megalite", "train", "quickstart", "--local"]
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    unfinished = tmp_path / "data" / "quickstart" / "builtin.unfinished"
    while not unfinished.exists():
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate()
    assert run.returncode == 75, err
    assert out.startswith("the data is not there yet, so this makes it: megalite data prepare ")
    assert "error: interrupted; no dataset was made" in err
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "data" / "quickstart" / "builtin.bin").exists()
