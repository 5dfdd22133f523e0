"""A config is data: nothing in one runs, whatever it looks like."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megalite.config.load import load_config
from megalite.errors import ConfigError
from tests import ROOT

CODE = "__import__('pathlib').Path('ran').touch()"


@pytest.mark.parametrize(
    "text",
    [
        f'name: !!python/object/apply:builtins.exec ["{CODE}"]\n',
        f'!!python/object/new:os.system ["{CODE}"]\n',
        f"name = {CODE}\n",
        f'[train]\nsteps = "{CODE}"\n',
    ],
)
def test_code_in_a_config_is_refused_and_does_not_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_config(str(path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["train.steps", "optimizer.lr", "parallel.stage_layers", "x"])
def test_code_on_the_command_line_is_refused_and_does_not_run(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text("")
    with pytest.raises(ConfigError):
        load_config(str(path), [f"{key}={CODE}"])
    assert not (tmp_path / "ran").exists()


# The one module that may read pickles: from the pipe of a process that it started itself, to which
# nothing else can write.
OWN_PIPES = ROOT / "megalite" / "corpus" / "encode_pool.py"


def test_no_module_evaluates_text_or_reads_pickles() -> None:
    for path in [*(ROOT / "megalite").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile"), path
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names]
                module = getattr(node, "module", None) or ""
                heads = {name.split(".")[0] for name in [*names, module]}
                allowed = {"pickle"} if path == OWN_PIPES else set()
                assert not heads & {"pickle", "marshal", "shelve", "yaml"} - allowed, path
