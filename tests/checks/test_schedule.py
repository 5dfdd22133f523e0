"""A schedule of one's own is read and held against the config before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megalite.checks import check_and_resolve
from megalite.checks.schedule import schedule_problems
from megalite.cli.main import app
from megalite.errors import ConfigError
from megalite.schedules import build
from megalite.schedules.csv_form import write_csv
from tests.checks.test_settings import config


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file for two ranks and four microbatches."""
    path = tmp_path / "mine.csv"
    path.write_text(write_csv(build("zb-h1", 2, 1, 4)))
    return path


def problems(path: object, dp: int | None = 1, **changes: Any) -> list[str]:
    settings = {"parallel__pp": 2, "train__global_batch": 4, **changes}
    return schedule_problems(config(pipeline__schedule=f"file:{path}", **settings), dp)


def test_a_file_that_fits_and_other_schedules_are_no_problem(path: Path) -> None:
    assert problems(path) == []
    assert problems(path, 4, train__global_batch=32, train__micro_batch=2) == []
    for name in ("zb-h1", "auto", None):
        assert schedule_problems(config(pipeline__schedule=name), 1) == []


def test_every_difference_from_the_config_is_told_at_once(path: Path) -> None:
    changes = {"parallel__pp": 4, "parallel__vpp": 2, "train__global_batch": 48}
    shown = f"pipeline.schedule=file:{path}"
    lines = problems(path, 2, **changes, train__micro_batch=3)
    assert lines == [
        f"{shown} is for 2 pipeline ranks, a line each, but parallel.pp=4; write 4 lines, or set "
        "parallel.pp=2",
        f"{shown} has stages 0 to 1, 1 on each rank, but parallel.vpp=2; write the file for 2, or "
        "set parallel.vpp=1",
        f"{shown} is for 4 microbatches, but train.global_batch=48 / (train.micro_batch=3 x "
        "parallel.dp=2) is 8; write the file for 8, or set train.global_batch=24",
    ]
    # before the number of processes is known, or where the batch itself is refused
    assert problems(path, None, **changes) == lines[:2]
    assert problems(path, 1, train__global_batch=7, train__micro_batch=2) == []


def test_a_file_that_cannot_be_used_is_told_by_name_line_and_remedy(path: Path) -> None:
    (line,) = problems("gone.csv")
    assert line == (
        f"pipeline.schedule: gone.csv: cannot be read: no such file below {Path.cwd()}; correct "
        "the path, or write one with `megalite schedule NAME --csv FILE`"
    )
    (line,) = problems(path.parent)
    assert line == f"pipeline.schedule: {path.parent}: cannot be read: Is a directory"
    (line,) = problems("")
    assert line.startswith("pipeline.schedule: file: names no file; write file:PATH")
    path.write_text("0F0,0B0\n1F0,1X0\n")
    (line,) = problems(path)
    assert line.startswith(f"pipeline.schedule: {path}: line 2, cell 2: '1X0' is no action; ")
    path.write_text("0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0\n")
    (line,) = problems(path)
    assert line.startswith(f"pipeline.schedule: {path}: line 2, cell 4: ")
    path.write_bytes(b"0F0,\xff\n")
    (line,) = problems(path)
    assert line.endswith("mine.csv: cannot be read: not UTF-8 text (byte 4); give a CSV file")
    # ranks that wait for each other: one line, however many ranks
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    (line,) = problems(path)
    assert "mine.csv: the schedule deadlocks: rank 0, index 1, action BW0.0: waits for" in line
    assert "; rank 1, index 0, action F1.1: waits for F0.1" in line


def test_the_command_line_answers_with_the_other_mistakes(path: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        "[model]\nnum_layers = 4\nhidden_size = 32\nnum_heads = 4\nffn_hidden_size = 64\n"
        "vocab_size = 97\n[data]\nseq_length = 16\n[train]\nsteps = 3\nglobal_batch = 4\n"
        f'[parallel]\npp = 2\n[pipeline]\nschedule = "file:{path}"\n'
    )

    def told(*arguments: str) -> list[str]:
        done = CliRunner().invoke(app, ["train", str(run), *arguments])
        assert done.exit_code == (2 if done.stderr else 0)
        return done.stderr.splitlines()

    assert told("--print-config") == told("--local", "--print-config") == []
    first, second = told("--print-config", "eval.batches=2", "pipeline.schedule=file:gone.csv")
    assert first.startswith("error: eval.batches=2 has no effect")
    assert second.startswith("error: pipeline.schedule: gone.csv: cannot be read: no such file")
    # how many ranks share the batch is known with --local only
    assert told("train.global_batch=8", "--print-config") == []
    (line,) = told("train.global_batch=8", "--local", "--print-config")
    assert "is for 4 microbatches, but train.global_batch=8 / " in line


def test_a_resolved_config_is_held_against_its_own_number_of_replicas(path: Path) -> None:
    settings: dict[str, Any] = {"pipeline__schedule": f"file:{path}", "parallel__pp": 2}
    check_and_resolve(config(**settings, parallel__dp=4))
    with pytest.raises(ConfigError, match="is for 4 microbatches"):
        check_and_resolve(config(**settings, parallel__dp=2))
