"""A run folder and a checkpoint that an earlier version wrote are read, and the run goes on.

tests/fixtures/run was written at commit ae88144 by `megalite data prepare` and `megalite train
run.toml --local` (tp 2 x dp 2, six steps); that version then went on to the losses stated here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.config import saved
from tests import ROOT
from tests.checkpoint.kit import rewrite
from tests.tolerances import FLOAT32
from tests.train.kit.runs import lines

FIXTURE = ROOT / "tests" / "fixtures" / "run"
RUN = "runs/before"
# step: loss and gradient norm, as that version logged them
WENT_ON = {
    7: (5.645737409591675, 0.8045660916143444),
    8: (5.6505959033966064, 0.7463632399230777),
    9: (5.646892786026001, 0.7430374449356794),
}
EVALUATED = 5.652684330940247  # after step 9
SAID = "Line 3\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the fixture, as the working folder."""
    shutil.copytree(FIXTURE, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    return tmp_path / "run"


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_fixture_is_small() -> None:
    files = [path for path in FIXTURE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 100_000


def test_its_record_is_reported(folder: Path) -> None:
    report = printed("report", RUN)
    assert "6 steps, 384 tokens, 3624 parameters" in report
    assert "training loss   5.6641 -> 5.6584" in report
    assert (folder / RUN / "loss.png").is_file()


def test_run_and_checkpoint_are_described(folder: Path) -> None:
    run = printed("info", RUN)
    assert "layout       tp 2 x pp 1 x vpp 1 x dp 2, float32, 4 x 16 tokens a step" in run
    assert "checkpoints  step-00000006  0.1 MiB  verified" in run
    checkpoint = printed("info", f"{RUN}/checkpoints/step-00000006")
    assert "weights      4.39k stored as float32; states exp_avg, exp_avg_sq, param" in checkpoint
    assert "saved at     tp 2 x cp 1 x dp 2 x pp 1" in checkpoint
    assert "files        4, 0.1 MiB in 42 tensors, verified" in checkpoint


def test_its_weights_generate_the_same_text(folder: Path) -> None:
    arguments = ("--prompt", "Line 3", "--tokens", "12", "--temperature", "0")
    assert printed("generate", RUN, *arguments) == SAID


# Settings of the manifest as another version would have them: what is changed there, what the
# tables of this one say, and what is wrong in the end.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "renamed": ({"train.tag": 1}, {"RENAMED": {"train.tag": ("log.interval",)}}, ""),
    "removed": ({"train.turbo": 0}, {"REMOVED": {"train.turbo": 0}}, ""),
    "removed with effect": ({"train.turbo": 2}, {"REMOVED": {"train.turbo": 0}}, "train.turbo=2"),
    "unknown": ({"model.twist": 3}, {}, "model.twist=3"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_settings_of_another_version_are_read_alike_by_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Resuming, starting from its weights, generating and describing."""
    settings, tables, problem = OTHERS[case]
    checkpoint = f"{RUN}/checkpoints/step-00000006"

    def change(body: Any) -> None:
        for name, value in settings.items():
            section, _, key = name.partition(".")
            body["config"][section][key] = value

    rewrite(folder / checkpoint, change)
    for name, table in tables.items():
        monkeypatch.setattr(saved, name, {**getattr(saved, name), **table})
    alone = ("train", "run.toml", "parallel.tp=1", "parallel.dp=1")
    for arguments in (
        alone,
        (*alone, "--name", "other", f"checkpoint.load_weights={RUN}", "train.steps=1"),
        ("generate", RUN, "--tokens", "1"),
        ("info", checkpoint),
    ):
        result = CliRunner().invoke(app, list(arguments))
        text = result.output + str(result.exception)
        assert problem in text, (arguments, text)
        assert ("was saved with settings that this version cannot read" in text) == bool(problem)
        assert (result.exit_code == 0) == (not problem), (arguments, text)


def test_the_run_goes_on_as_it_did_then(folder: Path) -> None:
    """At its own layout, with its moments, its place in the data and its learning rate."""
    command = [sys.executable, "-m", "megalite", "train", "run.toml", "--local", "train.steps=9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = {line["step"]: line for line in lines(folder / RUN, "step")}
    for step, (loss, norm) in WENT_ON.items():
        assert steps[step]["loss"] == pytest.approx(loss, rel=FLOAT32)
        assert steps[step]["grad_norm"] == pytest.approx(norm, rel=10 * FLOAT32)
    assert lines(folder / RUN, "eval")[-1]["loss"] == pytest.approx(EVALUATED, rel=FLOAT32)
