"""Every command, program and TOML file on the pages of README.md and docs/ works.

The commands are in `kit/commands.py`, which says how each is run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checks import open_run
from megalite.config.load import load_config
from megalite.config.text import to_toml
from tests import ROOT
from tests.repository.kit.commands import CHECKED, COMMANDS, PAGES, blocks, commands, fences

pytestmark = pytest.mark.long


def pages_with(language: str) -> list[Any]:
    return [
        pytest.param(page, id=page.relative_to(ROOT).as_posix())
        for page in PAGES
        if blocks(page, language)
    ]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repository's files to name, and this environment in place of .venv."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("benchmarks", "configs", "launch", "tests"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("schedules", "images"):
        (folder / "docs" / name).mkdir(parents=True)
    environment = folder / "venv"
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith(".installed"):
            (environment / entry.name).symlink_to(entry)
    for stamp in (".installed[plots]", ".installed[dev]"):
        (environment / stamp).touch()
    return folder


def test_every_command_of_the_pages_is_tested() -> None:
    shown = {command for page in PAGES for command in commands(page)}
    tested = {*COMMANDS, *CHECKED}
    assert shown <= tested, f"add to kit/commands.py: {sorted(shown - tested)}"
    assert tested <= shown, f"on no page: {sorted(tested - shown)}"


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(work: Path, command: str) -> None:
    replaced, added = COMMANDS[command]
    shown = command
    for old, new in replaced.items():
        assert old in shown
        shown = shown.replace(old, new)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MEGALITE_VENV": str(work / "venv"),
        "MEGALITE_WORK": str(work),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", f"{shown} {added}"],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{shown} {added}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def test_quickstart_leaves_what_it_promises(work: Path) -> None:
    run = work / "runs" / "quickstart"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "metrics.jsonl").is_file()
    assert list((run / "checkpoints").glob("step-*/manifest.json"))


def test_the_quickstart_resumed_at_another_layout_leaves_both_checkpoints(work: Path) -> None:
    saved = sorted(path.name for path in (work / "runs/exercise/checkpoints").glob("step-*"))
    assert saved == ["step-00000004", "step-00000008"]


@pytest.mark.parametrize("command", CHECKED)
def test_what_cannot_run_is_shell_and_names_what_exists(command: str) -> None:
    subprocess.run(["bash", "-n", "-c", command], check=True)
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for name in re.findall(r"--build-arg (\w+)=", command):
        assert f"ARG {name}=" in image, name
    assert not re.search(r"\b(megalite|torchrun|python3?) [a-z-]", command), "run it instead"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_block_names_its_language(page: Path) -> None:
    """So that nothing is shown as output which is a command."""
    for language, text in fences(page):
        assert language in ("", "bash", "python", "text", "toml"), f"{language}: {text}"
        if language in ("", "text"):
            first = [line.strip().split(" ")[0] for line in text.splitlines()]
            assert not {"megalite", "python", "torchrun", "srun", "pip"} & set(first), text


@pytest.mark.parametrize("page", pages_with("python"))
def test_its_programs_run(page: Path) -> None:
    """In order, with the names of those before; a weight that they make gets a gradient."""
    names: dict[str, Any] = {}
    for program in blocks(page, "python"):
        exec(compile(program, str(page), "exec"), names)
    weights = [value for value in names.values() if isinstance(value, torch.nn.Parameter)]
    assert all(weight.grad is not None for weight in weights)


@pytest.mark.parametrize("page", pages_with("toml"))
def test_its_settings_load(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block alone, or over the settings of the quickstart."""
    monkeypatch.chdir(ROOT)
    base, path = tmp_path / "base.toml", tmp_path / "block.toml"
    base.write_text(to_toml(open_run("configs/quickstart.toml").config))
    for block in blocks(page, "toml"):
        above = "" if "base = " in block else f'base = "{base}"\n'
        path.write_text(above + block.replace('"configs/', f'"{ROOT}/configs/'))
        assert str(path) in load_config(path).origins.values(), block
