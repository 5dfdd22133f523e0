"""The archives of a release: complete, sound, and enough in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from megalite import __version__
from megalite.config.shipped import shipped_configs
from megalite.kernels.triton import tables
from tests import ROOT, tracked_files

pytestmark = pytest.mark.long

SHORT = [
    "train.steps=2",
    "optimizer.warmup_steps=1",
    "eval.interval=0",
    'data.prepare=["builtin", "--vocab-size=512", "--max-bytes=300000", "--workers=1"]',
]


def run(*command: object, cwd: Path, **variables: str) -> str:
    """The output of a command, which has to succeed."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive, and the wheel built from it.

    Built from a tree as an archive without links leaves it: megalite/kernels is a text file.
    """
    folder = tmp_path_factory.mktemp("archives")
    source = folder / "source"
    for path in tracked_files():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (source / "megalite" / "kernels").write_text("../kernels")
    out = folder / "dist"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=folder)
    return out


@pytest.fixture(scope="module")
def environment(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel alone, which sees the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    (wheel,) = archives.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    # Named in a .pth, a folder is searched last, and its own .pth (an editable megalite) not read.
    (site,) = folder.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("-packages")]
    (site / "shared.pth").write_text("\n".join(shared))
    return folder


def test_the_archives_are_sound_and_say_who_may_use_them(archives: Path) -> None:
    files = sorted(archives.iterdir())
    assert [path.name for path in files] == [
        f"megalite-{__version__}-py3-none-any.whl",
        f"megalite-{__version__}.tar.gz",
    ]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=archives)
    with zipfile.ZipFile(files[0]) as wheel:
        folder = f"megalite-{__version__}.dist-info"
        metadata = message_from_bytes(wheel.read(f"{folder}/METADATA"))
        assert wheel.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "the megalite developers"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra" not in line]
    assert not [line for line in required if line.startswith(("matplotlib", "wandb", "tensorb"))]


def test_a_source_archive_is_the_checkout(archives: Path) -> None:
    (path,) = archives.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {member.name.partition("/")[2]: member for member in archive}
    names = {str(path.relative_to(ROOT)) for path in tracked_files()}
    assert names <= set(members)
    assert members["megalite/kernels"].linkname == "../kernels"
    made = {name for name, one in members.items() if one.isfile()} - names
    assert {name for name in made if ".egg-info/" not in name} <= {"PKG-INFO", "setup.cfg"}


def test_commands_of_the_wheel_run_in_an_empty_folder(environment: Path, tmp_path: Path) -> None:
    megalite = environment / "bin" / "megalite"
    python = environment / "bin" / "python"
    code = "import megalite; print(megalite.__file__)"
    assert run(python, "-c", code, cwd=tmp_path).startswith(str(environment))
    assert run(megalite, "--version", cwd=tmp_path) == f"megalite {__version__}\n"
    listed = run(megalite, "configs", cwd=tmp_path).split()
    assert set(shipped_configs()) <= set(listed)

    copy = tmp_path / "mine.toml"
    copy.write_text(run(megalite, "configs", "quickstart", cwd=tmp_path))
    shown = run(megalite, "train", "mine.toml", "--print-config", cwd=tmp_path)
    assert f"base {environment}" in shown
    planned = run(megalite, "plan", "llama-8b-64gpu", "--gpus", "64", cwd=tmp_path)
    assert "= 64 ranks" in planned
    copy.unlink()

    assert not list(tmp_path.iterdir())
    trained = run(
        megalite, "train", "quickstart", "--local", *SHORT, cwd=tmp_path, OMP_NUM_THREADS="1"
    )
    assert "this makes it: megalite data prepare builtin " in trained
    assert trained.splitlines()[-1] == "finished at step 2 of 2"
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"data", "runs"}


def test_the_wheel_has_the_table_of_its_kernels(environment: Path, tmp_path: Path) -> None:
    code = "from megalite.kernels.triton.tables import table_hash; print(table_hash())"
    shown = run(environment / "bin" / "python", "-c", code, cwd=tmp_path)
    assert shown == f"{tables.table_hash()}\n"


def test_a_type_checker_sees_the_types_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    code = "from megalite.errors import exit_code\nreveal_type(exit_code)"
    mypy = [sys.executable, "-m", "mypy", "--python-executable", environment / "bin" / "python"]
    shown = run(*mypy, "--cache-dir", tmp_path / "cache", "-c", code, cwd=tmp_path)
    assert 'Revealed type is "def (error: BaseException) -> int"' in shown.replace("builtins.", "")
