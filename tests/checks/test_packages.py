"""A package that a setting needs and that is not installed is told before anything starts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalite.checks import packages as config_extras
from megalite.checks.packages import install_command
from megalite.cli.main import app
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError
from megalite.layout.topology import Topology
from megalite.train.loop import Trainer
from tests import ROOT
from tests.train.kit.runs import make_config

RUN = """
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
ffn_hidden_size = 64
vocab_size = 97
[data]
seq_length = 16
[train]
steps = 3
global_batch = 4
[log]
tensorboard = true
[log.wandb]
project = "p"
"""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_extras, "is_installed", lambda package: False)


def test_the_command_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml")])
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    for line, package in zip(lines, ("tensorboard", "wandb"), strict=False):
        assert line.startswith("error: log.")
        assert f"install it with `pip install 'megalite[{package}]'`" in line


def test_the_extras_install_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package in ("matplotlib", "pyarrow", "tensorboard", "triton", "wandb"):
        found = re.fullmatch(r"pip install 'megalite\[(\w+)\]'", install_command(package))
        assert found is not None
        (requirement,) = project["optional-dependencies"][found[1]]
        assert requirement.startswith(f"{package}>=")
        assert not [line for line in project["dependencies"] if line.startswith(package)]


def test_a_picture_without_matplotlib_is_refused_in_a_line(tmp_path: Path) -> None:
    out = tmp_path / "x.png"
    result = CliRunner().invoke(app, ["schedule", "1f1b", "--png", str(out)])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: --png needs matplotlib, which is not installed: pip install 'megalite[plots]'; or "
        "use --svg, which needs no package\n"
    )
    assert not out.exists()


def test_a_trainer_refuses_before_it_opens_any_data(tmp_path: Path) -> None:
    config = make_config(tmp_path, "run", log__tensorboard=True)
    with pytest.raises(ConfigError, match="needs the package tensorboard"):
        Trainer(config, Mesh(Topology()))
    assert list(tmp_path.iterdir()) == []
