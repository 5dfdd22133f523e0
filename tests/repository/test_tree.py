"""What holds for the repository as a whole: floors, package map, README, files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests import ROOT, tracked_files

PURE = ("checks", "config", "errors", "layout", "planner", "run", "schedules", "wording")


def run_python(code: str, cwd: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pure_floor_imports_without_torch_or_numpy(tmp_path: Path) -> None:
    code = f"""
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "triton"):
            raise ImportError(f"{{name}} is not for the pure floors")
sys.meta_path.insert(0, Refuse())
count = 0
for name in {PURE!r}:
    module = importlib.import_module(f"megalite.{{name}}")
    for inner in pkgutil.walk_packages(getattr(module, "__path__", ()), f"megalite.{{name}}."):
        importlib.import_module(inner.name)
        count += 1
print(count)
"""
    assert int(run_python(code, tmp_path)) > 40


def test_kernels_import_only_torch_and_themselves() -> None:
    allowed = {"torch", "triton", "megalite.kernels", *sys.stdlib_module_names}
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                head = "megalite.kernels" if name.startswith("megalite.kernels") else name
                assert {head, head.split(".")[0]} & allowed, f"{path.name} imports {name}"


def test_kernels_are_never_the_top_level_package(tmp_path: Path) -> None:
    """Hugging Face's `kernels` has that name, and transformers imports it."""
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("ours = False\n")
    code = f"""
import sys
from importlib.util import find_spec
found = find_spec("kernels")
assert found is None or not str(found.origin).startswith({str(ROOT)!r}), found
sys.path.append({str(tmp_path / "site")!r})
import kernels, megalite.kernels
print(getattr(kernels, "ours", False), megalite.kernels.rms_norm.__module__)
"""
    assert run_python(code, tmp_path) == "False megalite.kernels.plain.norms\n"


def test_kernels_are_not_visible_from_this_suite_nor_the_command(tmp_path: Path) -> None:
    found = find_spec("kernels")
    assert found is None or ROOT not in Path(str(found.origin or ROOT)).parents
    command = Path(sysconfig.get_path("scripts")) / "megalite"
    code = f"""
import runpy, sys
sys.argv = [{str(command)!r}, "version"]
try:
    runpy.run_path({str(command)!r}, run_name="__main__")
except SystemExit as leaving:
    assert not leaving.code
from importlib.util import find_spec
print(find_spec("kernels") is None or "site-packages" in str(find_spec("kernels").origin))
"""
    assert run_python(code, ROOT, "-P").splitlines()[-1] == "True"


def test_hugging_face_kernels_wins_where_it_is_installed() -> None:
    """Nothing that an installation of megalite puts on the path is called `kernels`."""
    namespace: dict[str, object] = {}
    calls: list[dict[str, Any]] = []
    source = (ROOT / "setup.py").read_text(encoding="utf-8")
    code = compile(
        source.replace("from setuptools import find_packages, setup", ""), "setup", "exec"
    )
    from setuptools import find_packages

    namespace.update(
        find_packages=lambda where=".", **options: find_packages(str(ROOT / where), **options),
        setup=lambda **options: calls.append(options),
    )
    exec(code, namespace)
    top = {str(name).split(".")[0] for name in calls[0]["packages"]}
    assert top == {"megalite"}
    folders = [*packages(ROOT / "megalite"), *packages(ROOT / "kernels")]
    data = {path.parent for path in (ROOT / "configs").rglob("*.toml")}
    assert len(calls[0]["packages"]) == len(folders) + len(data) + 1  # and kernels/configs


def test_no_large_files_and_no_leftovers() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "X" + "XX")
    for path in tracked_files():
        assert path.stat().st_size <= 1_000_000, f"{path} is over 1 MB"
        if path.suffix in (".py", ".sh", ".toml", ".md"):
            text = path.read_text(encoding="utf-8")
            found = [mark for mark in marks if mark in text]
            assert not found, f"{path} holds {found}"


def packages(root: Path) -> list[Path]:
    """Folders of Python modules below `root`, itself included."""
    return sorted({path.parent for path in root.rglob("*.py")})


def test_architecture_names_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for folder in [*packages(ROOT / "megalite")[1:], *packages(ROOT / "kernels")]:
        name = f"{folder.relative_to(ROOT)}/"
        assert f"`{name.removeprefix('megalite/') or name}`" in text, f"no {name}"


def test_the_top_holds_packages() -> None:
    files = {path.name for path in (ROOT / "megalite").iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "errors.py", "py.typed", "wording.py"}
    assert len(list((ROOT / "kernels").glob("*.py"))) <= 8


def test_no_two_modules_define_a_public_class_of_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for root in ("megalite", "kernels", "launch"):
        for path in sorted((ROOT / root).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert not twice, f"one word, one thing: {twice}"


def test_the_glossary_has_about_thirty_words() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    own = text[: text.index("## Terms of the field")]
    words = [line.split("|")[1].strip() for line in own.splitlines() if line.startswith("| ")]
    assert words[1:] == sorted(words[1:])
    assert 28 <= len(words) - 1 <= 36


def test_four_files_of_one_prefix_are_a_package() -> None:
    for root in ("megalite", "kernels", "benchmarks", "tests", "launch"):
        for folder in packages(ROOT / root):
            stems = [path.stem.removeprefix("test_") for path in folder.glob("*.py")]
            prefixes = Counter(stem.split("_")[0] for stem in stems)
            crowded = [name for name, count in prefixes.items() if count >= 4]
            assert not crowded, f"{folder.relative_to(ROOT)}: make a package of {crowded}"


def test_helpers_of_tests_are_one_kit_a_package() -> None:
    free = {"__init__", "__main__", "conftest", "kit"}
    for folder in packages(ROOT / "tests"):
        if (
            folder in [ROOT / "tests" / name for name in ("", "parity", "mutation")]
            or folder.name == "kit"
        ):
            continue
        stems = {path.stem for path in folder.glob("*.py")}
        helpers = {stem for stem in stems if not stem.startswith("test_")} - free
        assert not helpers, f"{folder.relative_to(ROOT)}: {helpers} belong in its kit"


def test_version_is_stated_once() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "megalite.__version__"}
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert not re.search("^version:", citation, re.MULTILINE)


def test_a_rank_imports_nothing_for_people(tmp_path: Path) -> None:
    """Packages that draw, colour or read options would cost each of many ranks its start-up."""
    code = """
import sys
import megalite.train.rank
from megalite.record.console import Console
Console(quiet=True).print("line")
names = ("matplotlib", "rich", "typer", "wandb", "tensorboard", "pyarrow", "transformers")
print([name for name in names if name in sys.modules])
"""
    assert run_python(code, tmp_path) == "[]\n"
