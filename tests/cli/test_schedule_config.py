"""`megalite schedule --config`: a run's stages with their work, and its schedule or others."""

from __future__ import annotations

import json

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


def test_json_has_the_stages_and_what_was_left_out() -> None:
    found = json.loads("\n".join(lines("--compare", "--json")))
    work = plan_of(CONFIG, []).work()
    assert found["stages"] == [
        {"pipeline_rank": stage % 2, "layers": [stage], "work": work[stage]} for stage in range(4)
    ]
    assert any(line.startswith("dualpipe-v needs") for line in found["left_out"])
    assert {"interleaved", "zb-v"} <= {one["name"] for one in found["schedules"]}
    assert found["schedules"][0]["time_unit"] == "time (1 = the mean rank's work on one microbatch)"


def test_a_v_places_the_last_stage_beside_the_first() -> None:
    found = lines("pipeline.schedule=zb-v")
    assert [line.split()[1] for line in found[1:5]] == ["0", "1", "1", "0"]


def test_the_busiest_of_more_than_two_ranks_is_the_one_with_the_head() -> None:
    found = lines("parallel.pp=4", "parallel.vpp=1", "pipeline.schedule=1f1b")
    shares = [line.split()[3] for line in found[1:5]]
    assert found[5].endswith(f"the busiest rank has {shares[3]}")


def test_all_that_fit_are_compared_on_the_runs_own_times() -> None:
    table = lines("--compare", "train.global_batch=16")
    names = [line.split()[0] for line in table[7:]]
    assert {"interleaved", "zb-v"} <= set(names)
    assert "1f1b" not in names  # has one chunk
    plan = plan_of(CONFIG, ["train.global_batch=16"])
    (row,) = (line.split() for line in table if line.startswith("zb-v "))
    assert float(row[2]) == pytest.approx(simulate(*plan.schedule("zb-v")).makespan, rel=1e-3)


def test_those_that_do_not_fit_are_named() -> None:
    assert any(line.startswith("left out: dualpipe-v needs") for line in lines("--compare"))


def test_what_says_it_twice_is_refused() -> None:
    assert "--pp has no effect with --config" in refused("--config", CONFIG, "--pp", "4")
    assert "parallel.pp=2 changes the run of --config" in refused("zb-v", "parallel.pp=2")
    assert "--gpus=8 changes the run of --config" in refused("zb-v", "--gpus", "8")
    assert "--config has no effect with --from-run" in refused(
        "--config", CONFIG, "--from-run", "x"
    )
    assert "--gpus has no effect with --from-run" in refused("--from-run", "x", "--gpus", "8")
    assert "NAME|SECTION.KEY=VALUE has no effect with" in refused("zb-v", "--from-run", "x")
    assert "unknown key" in refused("--config", CONFIG, "parallel.pq=2")
    assert "is unknown" in refused("--config", CONFIG, "zb-w")
    assert "write parallel.pp=VALUE" in refused("--config", CONFIG, "--parallel.pp=2")


def test_the_equals_sign_in_a_schedules_name_makes_it_no_setting() -> None:
    done = CliRunner().invoke(app, ["schedule", "family:f=1,lag=2", "--pp", "2"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("family:f=1,lag=2: 2 ranks")


def test_gpus_leave_each_replica_its_share_of_the_batch() -> None:
    config = str(ROOT / "configs" / "runs" / "llama-8b-64gpu.toml")
    alone, shared = (
        CliRunner().invoke(app, ["schedule", "--config", config, *more]).output
        for more in ((), ("--gpus", "64"))
    )
    assert "2 ranks x 4 chunks, 512 microbatches" in alone
    assert "2 ranks x 4 chunks, 32 microbatches" in shared


def test_a_picture_too_wide_for_text_leaves_the_numbers_and_the_options() -> None:
    arguments = ["schedule", "1f1b", "--microbatches", "2000"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    title, advice = done.output.splitlines()
    assert title.startswith("1f1b: 4 ranks x 1 chunk, 2000 microbatches; step 6009, bubble ")
    assert advice.startswith("no picture here: the picture would be 6009 columns wide, 2000 are ")
    assert advice.endswith("(--unit, --svg, --html)")
    assert refused(*arguments[1:], "--unit", "1").startswith("error: the picture would be 6009 ")
