"""A run that was killed, stopped and started again logs what an uninterrupted one logs."""

from __future__ import annotations

import json
import os
import signal
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from megalite.record.report import read_run
from tests.train.kit.runs import checkpoint_tensors, different, lines
from tests.train.test_launch import (  # noqa: F401  server and runs are fixtures
    Runs,
    has_done,
    runs,
    server,
    wait_until,
)

pytestmark = pytest.mark.long

# What a step computes; the rest of its line is time and memory.
COMPUTED = (
    "step",
    "loss",
    "z_loss",
    "grad_norm",
    "lr",
    "tokens",
    "loss_tokens",
    "global_batch",
    "consumed_samples",
    "consumed_tokens",
)
SETTINGS = {
    "train__steps": 1_000_000,
    "train__global_batch": 4,
    "train__batch_ramp_start": 2,
    "train__batch_ramp_increment": 2,
    "train__batch_ramp_samples": 12,
    "train__z_loss": 1e-3,
    "train__loss_spike": "skip",
    "train__loss_spike_window": 8,
    "optimizer__warmup_steps": 0,
    "optimizer__warmup_tokens": 400,
    "checkpoint__interval": 3,
}


def computed(steps: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(line[key] for key in COMPUTED) for line in steps]


def test_kills_and_stops_leave_the_sequence_of_an_uninterrupted_run(
    runs: Runs,  # noqa: F811
) -> None:
    run, config = runs.folder / "run", runs.config("run", **SETTINGS)
    # killed in the middle of nowhere, twice: the second time before a new checkpoint is sure
    for steps in (5, 8):
        job = runs.start(config)
        wait_until(lambda: has_done(run, steps))  # noqa: B023
        os.kill(job.ranks()[1], signal.SIGKILL)
        assert job.code() == 128 + signal.SIGKILL, job.err
    job = runs.start(config)
    wait_until(lambda: has_done(run, 14))
    os.kill(job.pid, signal.SIGTERM)
    assert job.code() == 75, job.err
    end = max(line["step"] for line in lines(run, "step")) + 2
    done = [
        runs.start(config, f"train.steps={end}"),
        runs.start(runs.config("straight", **{**SETTINGS, "train__steps": end})),
    ]
    assert [job.code() for job in done] == [0, 0], [job.err for job in done]

    wanted = computed(lines(runs.folder / "straight", "step"))
    assert [row[0] for row in wanted] == list(range(1, end + 1))
    assert [row[COMPUTED.index("global_batch")] for row in wanted[:7]] == [2] * 6 + [4]
    assert computed(read_run(run).steps) == wanted
    # every attempt says where it began, goes on without a gap, and does again what was lost
    restarts = {line["attempt"]: line["step"] for line in lines(run, "restart")}
    assert list(restarts) == [2, 3, 4]
    for attempt, group in groupby(lines(run, "step"), key=lambda line: line["attempt"]):
        rows = computed(list(group))
        first = restarts.get(attempt, 0)
        assert rows == wanted[first : first + len(rows)]
    assert sum(len(list(rows)) for rows in [lines(run, "step")]) > end  # something was done twice
    straight = checkpoint_tensors(runs.folder / "straight", end)
    assert different(checkpoint_tensors(run, end), straight) == []


def test_two_runs_are_the_same_bits_and_the_switch_is_recorded(
    runs: Runs,  # noqa: F811
) -> None:
    settings = {
        **SETTINGS,
        "train__steps": 6,
        "optimizer__warmup_tokens": 100,
        "checkpoint__interval": 0,
    }
    jobs = [
        runs.start(runs.config("one", **settings)),
        runs.start(runs.config("two", **settings)),
        runs.start(runs.config("three", train__deterministic=True, **settings)),
    ]
    assert [job.code() for job in jobs] == [0, 0, 0], [job.err for job in jobs]
    folders = [runs.folder / name for name in ("one", "two", "three")]
    first, *others = (computed(lines(folder, "step")) for folder in folders)
    assert others == [first, first]  # on the CPU the switch changes nothing
    weights, *more = (checkpoint_tensors(folder, 6) for folder in folders)
    assert [different(weights, other) for other in more] == [[], []]
    told = [lines(folder, "run")[0]["deterministic"] for folder in folders]
    assert told[0] == {"algorithms": False, "cublas_workspace": None}
    assert told[2] == {"algorithms": True, "cublas_workspace": ":4096:8"}


def test_changes_are_accepted_on_the_command_line(runs: Runs) -> None:  # noqa: F811
    config = runs.config("run", train__steps=4)
    assert runs.start(config, "train.steps=2").code() == 0
    refused = runs.start(config, "optimizer.lr=0.001")
    assert refused.code() == 2
    assert "error: optimizer.lr is 0.001, saved with 0.01\n" in refused.err
    assert "--accept optimizer.lr" in refused.err
    for flags in (["--accept", "optimizer.lr,train.seed"], []):
        job = runs.start(config, "optimizer.lr=0.001", *flags)
        assert job.code() == 0, job.err
    run = runs.folder / "run"
    (change,) = [c for c in lines(run, "restart")[0]["changed"] if c["accepted"]]
    assert json.dumps(change) == (
        '{"key": "optimizer.lr", "old": 0.01, "new": 0.001, "accepted": true}'
    )
    assert [line["lr"] for line in lines(run, "step")][-1] == 0.001


def test_an_impossible_change_is_refused_before_anything_starts(
    tmp_path: Path,
    runs: Runs,  # noqa: F811
) -> None:
    job = runs.start(runs.config("run"), "--accept", "model.num_layers,train.sead")
    assert job.code() == 2
    assert job.err == (
        "error: --accept model.num_layers: cannot change within a run; start a run with another "
        "name\nerror: --accept train.sead: no such setting; did you mean train.seed?\n"
    )
    assert not (runs.folder / "run").exists()
