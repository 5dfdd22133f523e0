"""`megalite schedule --config`: a run's stages with their work, and its schedule or others."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.cli.schedule_config import plan_of
from megalite.schedules import simulate
from tests import ROOT

CONFIG = str(ROOT / "configs" / "quickstart.toml")


def lines(*arguments: str) -> list[str]:
    done = CliRunner().invoke(app, ["schedule", "--config", CONFIG, *arguments])
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["schedule", *arguments])
    assert done.exit_code == 2
    return done.stderr


def test_stages_and_their_work_are_listed_and_the_schedule_drawn() -> None:
    head, *stages, total, title, first, second = lines()
    assert head.split() == ["stage", "rank", "layers", "work"]
    assert [line.split()[:3] for line in stages] == [
        ["0", "0", "0-0"],
        ["1", "1", "1-1"],
        ["2", "0", "2-2"],
        ["3", "1", "3-3"],
    ]
    assert stages[0].endswith("embedding")
    assert stages[-1].endswith("head")
    work = [float(line.split()[3].rstrip("%")) for line in stages]
    assert sum(work) == pytest.approx(200.0, abs=0.3)  # two ranks, 100 % on average
    assert f"{work[1] + work[3]:.0f}" in total.rsplit(maxsplit=1)[1]  # the rank with the head
    assert title.startswith("interleaved: 2 ranks x 2 chunks, 2 microbatches; step ")
    assert (first[0], second[0]) == ("0", "1")


def test_the_work_is_that_of_the_layers_and_the_head() -> None:
    work = plan_of(CONFIG, []).work()
    assert work[0] == work[1] == work[2] < work[3]
    moved = plan_of(CONFIG, ["parallel.stage_layers=[1, 1, 2, 0]"]).work()
    assert moved[2] == pytest.approx(2 * moved[0])
    assert moved[3] == pytest.approx(work[3] - work[0])


def test_a_v_places_the_last_stage_beside_the_first() -> None:
    found = lines("--set", "pipeline.schedule=zb-v")
    assert [line.split()[1] for line in found[1:5]] == ["0", "1", "1", "0"]


def test_the_busiest_of_more_than_two_ranks_is_the_one_with_the_head() -> None:
    changes = ("parallel.pp=4", "parallel.vpp=1", "pipeline.schedule=1f1b")
    found = lines(*(word for change in changes for word in ("--set", change)))
    shares = [line.split()[3] for line in found[1:5]]
    assert found[5].endswith(f"the busiest rank has {shares[3]}")


def test_all_that_fit_are_compared_on_the_runs_own_times() -> None:
    table = lines("--compare", "--set", "train.global_batch=16")
    names = [line.split()[0] for line in table[7:]]
    assert {"interleaved", "zb-v"} <= set(names)
    assert "1f1b" not in names  # has one chunk
    plan = plan_of(CONFIG, ["train.global_batch=16"])
    (row,) = (line.split() for line in table if line.startswith("zb-v "))
    assert float(row[2]) == pytest.approx(simulate(*plan.schedule("zb-v")).makespan, rel=1e-3)


def test_those_that_do_not_fit_are_named() -> None:
    assert any(line.startswith("left out: dualpipe-v needs") for line in lines("--compare"))


def test_what_says_it_twice_is_refused() -> None:
    assert "--stages has no effect with --config" in refused("--config", CONFIG, "--stages", "4")
    assert "--set changes a setting of --config" in refused("zb-v", "--set", "parallel.pp=2")
    assert "no --config with it" in refused("--config", CONFIG, "--from-run", "x")
    assert "unknown key" in refused("--config", CONFIG, "--set", "parallel.pq=2")
    assert "is unknown" in refused("--config", CONFIG, "zb-w")
