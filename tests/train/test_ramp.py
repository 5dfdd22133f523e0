"""A batch that grows: the same samples and numbers at every layout and around every resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megalite.config import RunConfig
from megalite.record.console import Console
from megalite.train.loop import Trainer
from tests.pool import RankPool
from tests.tolerances import PARITY_FLOAT64
from tests.train.kit.runs import (
    Outcome,
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

# Batches of 2 (3 steps: 6 samples), 4 (2: 14), 6 (1: 20), then 8; epochs of 13 end within steps.
RAMP = {
    "train__steps": 0,  # as many as the tokens take
    "train__tokens": 36 * 16,
    "train__global_batch": 8,
    "train__batch_ramp_start": 2,
    "train__batch_ramp_increment": 2,
    "train__batch_ramp_tokens": 18 * 16,
    "train__micro_batch": 1,
    "optimizer__warmup_steps": 0,
    "optimizer__warmup_tokens": 6 * 16,
    "optimizer__lr_schedule": "linear",
}
BATCHES = [2, 2, 2, 4, 4, 6, 8, 8]
STARTS = [0, 2, 4, 6, 10, 14, 20, 28, 36]
STOPS = (1, 3, 4, 6)  # within the warm-up and a stage, at a stage's end, within one, at the last


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ramp")
    write_tokens(path / "data", 13)
    return path


def ramp(folder: Path, name: str, layout: str = "serial", **changes: Any) -> RunConfig:
    settings = {**RAMP, **changes}
    return make_config(folder, name, layout, **{k: v for k, v in settings.items() if v is not None})


def samples(outcomes: list[Outcome]) -> list[list[int]]:
    steps = {step: ids for outcome in outcomes for step, ids in outcome.sample_ids.items()}
    return [steps[step] for step in range(len(BATCHES))]


@pytest.mark.long
def test_stages_lengths_and_rates_follow_the_plan(pool: RankPool, folder: Path) -> None:
    straight, stopped = ramp(folder, "straight"), ramp(folder, "stopped")
    assert straight.train.steps == len(BATCHES)
    jobs = [(straight, None), *((stopped, stop) for stop in STOPS), (stopped, None)]
    ((first, *rest),) = pool.run(train, 1, jobs)
    assert [o.code for o in rest] == [75] * len(STOPS) + [0]
    assert [o.first_step for o in rest] == [0, *STOPS]
    assert samples(rest) == samples([first])
    flat = [sample for step in samples([first]) for sample in step]
    assert sorted(flat[:13]) == sorted(flat[13:26]) == list(range(13))
    steps = lines(folder / "straight", "step")
    assert [line["global_batch"] for line in steps] == BATCHES
    assert [line["tokens"] for line in steps] == [16 * batch for batch in BATCHES]
    assert [line["consumed_samples"] for line in steps] == STARTS[1:]
    assert [line["consumed_tokens"] for line in steps] == [16 * n for n in STARTS[1:]]
    left = [1.0, *(1 - (start - 6) / 30 for start in STARTS[3:-1])]
    rates = [1 / 3, 2 / 3, *left]
    assert [line["lr"] for line in steps] == pytest.approx([1e-2 * rate for rate in rates])

    assert step_numbers(folder / "stopped") == step_numbers(folder / "straight")
    assert not different(*(checkpoint_tensors(folder / n, 8) for n in ("straight", "stopped")))


def watched(ctx: Any, config: RunConfig, stop_at: int) -> tuple[list[Any], list[int]]:
    """Runs in a rank: what the progress bar is told, of the way and of each step's end."""
    ways: list[Any] = []
    ends: list[int] = []
    console = Console(quiet=True)

    @contextmanager
    def progress(done: int, total: int) -> Iterator[None]:
        ways.append((done, total))
        yield

    def advance(done: int) -> None:
        ends.append(done)

    console.progress = progress
    console.advance = advance
    for stop in (stop_at, None):
        Trainer(config, ctx.mesh(), console).run(stop)
    return ways, ends


def test_progress_counts_samples_so_that_the_time_left_is_right(
    pool: RankPool, folder: Path
) -> None:
    ((ways, ends),) = pool.run(watched, 1, ramp(folder, "watched"), 4)
    assert ways == [(0, STARTS[-1]), (STARTS[4], STARTS[-1])]
    assert ends == STARTS[1:]


@pytest.mark.long
def test_every_layout_takes_the_same_steps(pool: RankPool, folder: Path) -> None:
    exact = {"train__dtype": "float64"}
    serial = ramp(folder, "exact", **exact)
    ((wanted,),) = pool.run(train, 1, [(serial, None)])
    automatic = {"pipeline__schedule": "auto", "train__recompute": "stage"}
    for layout, stop, more in (("interleaved", 4, automatic), ("zero1", 5, {})):
        config = ramp(folder, f"exact-{layout}", layout, **exact, **more)
        ranks = pool.run(train, world_size(config), [(config, stop), (config, None)])
        assert [[o.code for o in rank] for rank in ranks] == [[75, 0]] * world_size(config)
        dp = config.parallel.dp or 1
        together = zip(*(samples(rank) for rank in ranks[:dp]), strict=True)
        assert [[i for ids in step for i in ids] for step in together] == samples([wanted])
        got = losses(folder / config.name)
        assert got == pytest.approx(losses(folder / "exact"), rel=PARITY_FLOAT64)


def test_ramp_in_samples_with_a_length_in_steps(pool: RankPool, folder: Path) -> None:
    changes: dict[str, Any] = {
        "train__steps": 8,
        "train__tokens": None,
        "train__batch_ramp_tokens": None,
        "train__batch_ramp_samples": 18,
        "optimizer__warmup_tokens": None,
    }
    config = ramp(folder, "in-samples", **changes)
    ((outcome,),) = pool.run(train, 1, [(config, None)])
    assert outcome.code == 0
    assert [line["global_batch"] for line in lines(folder / "in-samples", "step")] == BATCHES
