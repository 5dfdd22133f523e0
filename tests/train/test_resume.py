"""A run that was stopped and resumed computes what an uninterrupted one computes, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import RankPool
from tests.tolerances import PARITY_FLOAT64
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    checkpoint_tensors,
    different,
    lines,
    losses,
    make_config,
    step_numbers,
    train,
    world_size,
    write_tokens,
)

pytestmark = pytest.mark.long

STEPS = 6
# Before any step, within warm-up, at an epoch's end (3 x 4 samples), within the second, at the end.
STOPS = (0, 1, 3, 4, STEPS)
NUM_PARAMETERS = 4 * 6 + 3  # of four layers; embedding, last norm, head
SAMPLES = 3 * GLOBAL_BATCH


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume")
    write_tokens(path / "data", SAMPLES)
    return path


@pytest.mark.parametrize(
    ("layout", "dtype", "tied"),
    [
        ("serial", "float32", False),
        ("tp2", "bfloat16", False),
        ("interleaved", "float32", False),
        ("interleaved", "bfloat16", False),
        ("zero1", "float32", False),
        ("zero1", "bfloat16", False),
        ("3d", "bfloat16", False),
        ("3d", "float32", True),
    ],
)
def test_resumed_at_every_kind_of_step_equals_never_stopped(
    pool: RankPool, folder: Path, layout: str, dtype: str, tied: bool
) -> None:
    name, options = f"{layout}-{dtype}", {"train__dtype": dtype, "model__tie_embeddings": tied}
    straight = make_config(folder, f"{name}-straight", layout, **options)
    stopped = make_config(folder, f"{name}-stopped", layout, **options)
    jobs = [(straight, None), *((stopped, stop) for stop in STOPS), (stopped, None)]
    for outcomes in pool.run(train, world_size(straight), jobs):
        assert [o.code for o in outcomes] == [0, 75, 75, 75, 75, 0, 0]
        assert [o.first_step for o in outcomes] == [0, 0, 0, 1, 3, 4, STEPS]

    wanted, found = folder / straight.name, folder / stopped.name
    assert len(step_numbers(wanted)) == STEPS
    assert step_numbers(found) == step_numbers(wanted)
    assert [line["attempt"] for line in lines(found, "step")] == [2, 3, 3, 4, 5, 5]
    assert [line["step"] for line in lines(found, "restart")] == [0, 1, 3, 4, STEPS]
    tensors = checkpoint_tensors(found, STEPS)
    assert len(tensors) == 3 * (NUM_PARAMETERS - tied)
    assert different(tensors, checkpoint_tensors(wanted, STEPS)) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [("tp2", "dp2"), ("interleaved", "serial"), ("zero1", "serial"), ("serial", "interleaved")],
)
def test_resumed_at_another_layout_goes_on_as_before(
    pool: RankPool, folder: Path, before: str, after: str
) -> None:
    name = f"{before}-{after}"
    exact = {"train__dtype": "float64"}
    straight = make_config(folder, f"{name}-straight", **exact)
    first = make_config(folder, name, before, **exact)
    second = make_config(folder, name, after, train__micro_batch=2, **exact)
    for config, stop in ((straight, None), (first, 3), (second, None)):
        outcomes = pool.run(train, world_size(config), [(config, stop)])
        assert [o.code for (o,) in outcomes] == [75 if stop else 0] * world_size(config)

    wanted = losses(folder / straight.name)
    assert losses(folder / name) == pytest.approx(wanted, rel=PARITY_FLOAT64)
    end = checkpoint_tensors(folder / name, STEPS)
    for key, tensor in checkpoint_tensors(folder / straight.name, STEPS).items():
        assert (tensor - end[key]).abs().max() < PARITY_FLOAT64, key


def test_the_same_samples_in_the_same_order_at_every_layout_and_around_resumes(
    pool: RankPool, tmp_path: Path
) -> None:
    num_samples = 10  # no multiple of the batch: epochs end within steps
    write_tokens(tmp_path / "data", num_samples)
    orders = {}
    for layout, stops in (("serial", [None]), ("dp2", [2, 4, None]), ("3d", [3, None])):
        config = make_config(tmp_path, layout, layout)
        tp, dp = config.parallel.tp, config.parallel.dp or 1
        ranks = [
            {step: ids for outcome in outcomes for step, ids in outcome.sample_ids.items()}
            for outcomes in pool.run(train, world_size(config), [(config, s) for s in stops])
        ]
        replicas = [ranks[tp * index] for index in range(dp)]
        assert ranks == [replicas[rank // tp % dp] for rank in range(world_size(config))]
        orders[layout] = [
            [sample for replica in replicas for sample in replica[step]] for step in range(STEPS)
        ]
    assert orders["dp2"] == orders["serial"]
    assert orders["3d"] == orders["serial"]
    flat = [sample for step in orders["serial"] for sample in step]
    epochs = [flat[:num_samples], flat[num_samples : 2 * num_samples]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(num_samples))] * 2
    assert epochs[0] != epochs[1]


def test_initial_weights_are_the_same_bits_at_every_layout(pool: RankPool, folder: Path) -> None:
    nothing: dict[str, Any] = {
        "train__steps": 0,
        "optimizer__warmup_steps": 0,
        "optimizer__lr_schedule": "constant",
    }
    found = {}
    for layout in ("serial", "tp2", "interleaved", "zero1", "3d"):
        config = make_config(folder, f"untrained-{layout}", layout, **nothing)
        for (outcome,) in pool.run(train, world_size(config), [(config, None)]):
            assert outcome.code == 0
        found[layout] = checkpoint_tensors(folder / config.name, 0)
    for layout, tensors in found.items():
        assert different(tensors, found["serial"]) == [], layout


def test_a_run_of_no_steps_can_be_extended(pool: RankPool, folder: Path) -> None:
    options: dict[str, Any] = {
        "optimizer__lr_schedule": "constant",
        "optimizer__warmup_steps": 0,
    }
    empty = make_config(folder, "extended", train__steps=0, **options)
    longer = make_config(folder, "extended", train__steps=2, **options)
    straight = make_config(folder, "as-long", train__steps=2, **options)
    (outcomes,) = pool.run(train, 1, [(empty, None), (longer, None), (straight, None)])
    assert [o.code for o in outcomes] == [0, 0, 0]
    assert step_numbers(folder / "extended") == step_numbers(folder / "as-long")
