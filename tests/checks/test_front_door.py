"""The front door: every problem of a run at once, one way from a file to a resolved config."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megalite.checks import check_and_resolve, open_run
from megalite.config.inputs import missing_inputs
from megalite.errors import ConfigError
from tests import ROOT

RUN = """
[model]
num_layers = 4
hidden_size = 32
num_heads = 4
ffn_hidden_size = 64
vocab_size = 96
[parallel]
pp = 2
[data]
seq_length = 16
[train]
steps = 3
global_batch = 8
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return file


def test_every_kind_of_problem_is_reported_at_once(path: Path) -> None:
    settings = ["parallel.tp=3", "pipeline.schedule=file:gone.csv", "data.path=nowhere"]
    with pytest.raises(ConfigError) as caught:
        open_run(path, settings, world_size=7, more=[missing_inputs])
    starts = ["world size 7 ", "parallel.tp=3 ", "pipeline.schedule: gone.csv", "data.path=nowhere"]
    for start in starts:
        assert any(problem.startswith(start) for problem in caught.value.problems), start


def test_what_is_open_follows_from_the_world_size(path: Path) -> None:
    assert open_run(path).config.parallel.dp == 1
    run = open_run(path, world_size=8)
    assert (run.config.parallel.dp, run.config.pipeline.schedule) == (4, "zb-h1")
    assert run.origins["parallel.dp"] == run.origins["pipeline.schedule"] == "derived"
    assert check_and_resolve(run.config, 8) == run.config


def test_the_number_of_replicas_may_stay_open(path: Path) -> None:
    config = open_run(path, ["train.global_batch=6"], keep_dp_open=True).config
    assert (config.parallel.dp, config.pipeline.schedule) == (None, "zb-h1")
    assert open_run(path, ["parallel.dp=2"], keep_dp_open=True).config.parallel.dp == 2
    assert open_run(path, world_size=4, keep_dp_open=True).config.parallel.dp == 2


def test_nobody_goes_around_the_front_door() -> None:
    """Loading, checking and resolving by hand leaves a check out sooner or later."""
    inside = {"load_config", "check_config", "resolve", "schedule_problems"}
    for root in ("megalite", "benchmarks", "launch"):
        for file in (ROOT / root).rglob("*.py"):
            if file.parent == ROOT / "megalite" / "checks":
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megalite"):
                    found = inside & {alias.name for alias in node.names}
                    assert not found, f"{file.relative_to(ROOT)} imports {found}; use open_run"
