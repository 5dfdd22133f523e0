"""The front door: every problem of a run at once, one way from a file to a resolved config."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalite.checks import check_and_resolve, open_run
from megalite.cli.main import app
from megalite.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from megalite.config.inputs import missing_inputs
from megalite.config.names import keys
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError
from megalite.layout.topology import Topology
from megalite.process.launcher import Launch
from megalite.schedules import build
from megalite.schedules.csv_form import write_csv
from megalite.train.engine import Engine
from megalite.train.start_checks import launcher_problems, start_problems
from tests import ROOT
from tests.data.kit import write_dataset

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
    data = write_dataset(tmp_path / "data", [list(range(90))] * 9, 96)
    file.write_text(RUN.replace("[data]", f'[data]\npath = "{data}"'))
    return file


def test_every_kind_of_problem_is_reported_at_once(path: Path) -> None:
    settings = ["parallel.tp=3", "pipeline.schedule=file:gone.csv", "data.path=nowhere"]
    with pytest.raises(ConfigError) as caught:
        open_run(path, settings, world_size=7, more=[missing_inputs])
    starts = ["world size 7 ", "parallel.tp=3 ", "pipeline.schedule: gone.csv", "data.path=nowhere"]
    for start in starts:
        assert any(problem.startswith(start) for problem in caught.value.problems), start


def alone(config: RunConfig) -> list[str]:
    return launcher_problems(config, Launch(), local=config.parallel.pp == 2)


def problems(path: Path, *settings: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        open_run(path, settings, more=[missing_inputs, start_problems, alone])
    return caught.value.problems


@pytest.mark.parametrize(
    ("settings", "starts"),
    [
        (["train.steps=-1", "parallel.tp=3"],
         ["train.steps=-1 (override) needs", "parallel.tp=3 does not divide model.num_heads",
          "parallel.tp=3 does not divide model.ffn", "parallel.tp=3 does not divide the padded"]),
        (["model.num_layers=none", "train.micro_batch=3", "data.path=nowhere"],
         ['model.num_layers="none" (override) needs', "train.global_batch=8 is not divisible",
          "data.path=nowhere: no file"]),
        (["trian.foo=1", "eval.batches=2"], ["unknown key trian.foo", "eval.batches=2 has no"]),
        (["train.batch_size=4", "parallel.pp=5"],
         ["unknown key train.batch_size (override); that", "model.num_layers=4 is too few for",
          "parallel.tp=1 x parallel.pp=5 x parallel.dp=1 needs 5"]),
        # what is named otherwise elsewhere hides nothing
        (["dump_folder=x", "data.path=nowhere"],
         ["unknown key dump_folder (override); that is out", "data.path=nowhere: no file"]),
        (["run_name=x", "data.path=nowhere", "parallel.pp=1", "parallel.dp=2"],
         ["unknown key run_name (override); that is name", "data.path=nowhere: no file",
          "parallel.tp=1 x parallel.pp=1 x parallel.dp=2 needs 2"]),
        (["data.path=none", "train.steps=x"],
         ['train.steps="x" (override) needs', "neither data.path nor data.sources is set"]),
        # what another choice would make of the rest is not known
        (["optimizer.lr_schedule=constnat", "optimizer.decay_steps=2"],
         ['optimizer.lr_schedule="constnat" (override) needs']),
        (["train.global_batch=x", "optimizer.warmup_tokens=5"],
         ['train.global_batch="x" (override) needs']),
        (["data.path=none", "data.sources=x"], ['data.sources="x" (override) needs']),
        (["parallel.pp=x", "parallel.dp=2"], ['parallel.pp="x" (override) needs']),
        (["parallel.tp=x", "parallel.sequence_parallel=true"],
         ['parallel.tp="x" (override) needs']),
    ],
)  # fmt: skip
def test_settings_that_can_be_read_are_checked_beside_those_that_cannot(
    path: Path, settings: list[str], starts: list[str]
) -> None:
    found = problems(path, *settings)
    assert len(found) == len(starts), found
    for line, start in zip(found, starts, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize("name", [k.name for k in keys().values() if k.choices or not k.is_string])
def test_a_setting_that_cannot_be_read_makes_no_problem_of_another(path: Path, name: str) -> None:
    (line,) = problems(path, f"{name}={{wrong = 1}}")
    assert line.startswith(f"{name}=")


def test_one_number_stands_in_for_every_required_setting() -> None:
    required = [key for key in keys().values() if key.required]
    assert {kind for key in required for kind in key.kinds} == {int}


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


def test_a_lone_process_that_should_be_several_is_told_so_first(path: Path) -> None:
    """A schedule's file for more replicas is right, if the run was meant for a launcher."""
    file = path.parent / "two.csv"
    file.write_text(write_csv(build("1f1b", 2, 1, 4)))  # fits dp = 2
    arguments = ["train", str(path), f"pipeline.schedule=file:{file}"]
    data = write_dataset(path.parent / "data", [list(range(90))] * 9, 96)
    result = CliRunner().invoke(app, [*arguments, f"data.path={data}"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: parallel.tp=1 x parallel.pp=2 x parallel.dp=1 needs 2 ")


def test_an_engine_refuses_what_is_not_resolved() -> None:
    model = ModelConfig(num_layers=1, hidden_size=8, num_heads=1, ffn_hidden_size=8, vocab_size=8)
    config = RunConfig(
        model=model, data=DataConfig(seq_length=8), train=TrainConfig(steps=1, global_batch=1)
    )
    with pytest.raises(ConfigError, match=r"parallel\.dp=None .*check_and_resolve"):
        Engine(config, Mesh(Topology()))
    Engine(check_and_resolve(config), Mesh(Topology()))
