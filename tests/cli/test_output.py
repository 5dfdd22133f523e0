"""Standard output that cannot be written: one line on stderr, whichever verb prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_main import run_with_data

FULL = (
    "error: standard output cannot be written: No space left on device; make room or write it to "
    "another place\n"
)


def megalite(folder: Path, words: str, stdout: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megalite", *words.split()],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(run_with_data(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "plan run.toml",
        "train run.toml --print-config",
        "schedule",
        "data inspect tokens",
    ],
)
def test_a_full_disk_behind_standard_output_ends_a_verb_in_a_line(folder: Path, words: str) -> None:
    with open("/dev/full", "w") as full:
        done = megalite(folder, words, full.fileno())
    assert (done.returncode, done.stderr) == (2, FULL)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("size", [10, 100_000])
def test_what_is_left_to_write_at_exit_is_reported_too(unbuffered: str, size: int) -> None:
    code = f"""
import sys
from megalite.process.terminal import reported_output
with reported_output():
    print("x" * {size})
    sys.exit(0)
"""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-c", code]
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert (done.returncode, done.stderr) == (2, FULL)


@pytest.mark.parametrize("words", ["--help", "plan run.toml"])
def test_a_reader_that_is_gone_ends_a_verb_quietly(folder: Path, words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = megalite(folder, words, writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_disk_behind_standard_error_keeps_the_exit_code(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "megalite", "plan", "gone.toml"]
        done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, stderr=full, check=False)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_ones_files(folder: Path, closed: str) -> None:
    """A run's own file must not get the number of one, nor a print find nothing to print to."""
    command = f"{sys.executable} -m megalite train run.toml --local --device cpu {closed}"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    log = (folder / "runs/run/log.txt").read_text()
    assert "finished at step 3 of 3" in log
    assert "warning" not in log
