"""docs/reading.md: its files exist, come after what they need, and fit into a weekend."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests import ROOT

TEXT = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
ROAD = re.findall(r"^\d+\. `([^`]+)`", TEXT, re.MULTILINE)
MOST_LINES = 10_000


def test_the_road_is_short_enough() -> None:
    assert len(ROAD) == len(set(ROAD)) > 50
    lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in ROAD)
    assert lines < MOST_LINES


def test_the_numbers_count() -> None:
    numbers = re.findall(r"^(\d+)\. `", TEXT, re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(1, len(ROAD) + 1))


@pytest.mark.parametrize("page", ["docs/reading.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.[a-z]+)`", text))
    assert named
    for path in named:
        assert (ROOT / path).is_file() or (ROOT / "megalite" / path).is_file(), path


def test_a_file_is_read_after_what_it_imports() -> None:
    """Within the road; importing a file that the road leaves out is no hindrance."""
    place = {path: number for number, path in enumerate(ROAD)}
    early = []
    for path, number in place.items():
        source = (ROOT / path).read_text(encoding="utf-8")
        for module in re.findall(r"^from (megalite\.[\w.]+) import", source, re.MULTILINE):
            needed = f"{module.replace('.', '/')}.py"
            if place.get(needed, -1) > number:
                early.append(f"{path} needs {needed}")
    assert not early, early


@pytest.mark.long
def test_the_commands_of_the_exercises_run(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL))
    assert commands.count("megalite train") == 2
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    saved = sorted(path.name for path in (tmp_path / "runs/exercise/checkpoints").glob("step-*"))
    assert saved == ["step-00000004", "step-00000008"]
