"""The validation losses: one number a set at every layout, at the right steps, no side effects."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megalite.config import RunConfig
from megalite.train.evaluate import EvalResult, evaluate, evaluate_set
from tests.pool import RankPool
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    SEQ_LENGTH,
    lines,
    make_config,
    make_trainer,
    step_numbers,
    train,
    world_size,
    write_tokens,
)

# 481 tokens: 240 to train on; the 15 samples of the rest are 3 global batches and 3/4 of one.
SPLIT = (0.5, 0.5)
TOKENS = GLOBAL_BATCH * SEQ_LENGTH


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluation")
    write_tokens(path / "data", 30)
    write_tokens(path / "code", 9, seed=1)
    write_tokens(path / "tiny", 1, seed=2)
    return path


def score(ctx: Any, configs: list[RunConfig]) -> list[list[EvalResult]]:
    """Runs in a rank: the results of an untrained model for each config."""
    found = []
    for config in configs:
        trainer = make_trainer(ctx, config)
        results = evaluate(trainer.engine, trainer.data.sets)
        assert results is not None
        found.append(results)
    return found


def sets_of(folder: Path, layout: str, **changes: Any) -> RunConfig:
    # document masks leave ranks with different numbers of valid tokens
    options: dict[str, Any] = {
        "data__split": SPLIT,
        "data__document_masks": True,
        "eval__interval": 1,
        "eval__sets": [
            {"name": "code", "path": str(folder / "code")},
            {"name": "tiny", "path": str(folder / "tiny")},
        ],
    }
    return make_config(folder, "scored", layout, **options | changes)


@pytest.mark.long
def test_each_set_has_one_loss_whatever_the_layout(pool: RankPool, folder: Path) -> None:
    """To the last bit over dp and pp, where the arithmetic of a microbatch is the same."""
    wanted: dict[str, list[EvalResult]] = {}
    for layout in ("serial", "dp2", "dp4", "pp2", "tp2"):
        configs = [sets_of(folder, layout, train__dtype=dtype) for dtype in ("float32", "float64")]
        ranks = pool.run(score, world_size(configs[0]), configs)
        assert all(results == ranks[0] for results in ranks)
        for dtype, results in zip(("float32", "float64"), ranks[0], strict=True):
            exact = layout != "tp2"
            tolerance = 1e-13 if dtype == "float64" else 0.0 if exact else 1e-6
            for found, one in zip(results, wanted.setdefault(dtype, results), strict=True):
                assert (found.name, found.tokens) == (one.name, one.tokens)
                assert found.loss == pytest.approx(one.loss, rel=tolerance, abs=0), (layout, dtype)
    names = [(result.name, result.tokens) for result in wanted["float32"]]
    assert [name for name, _ in names] == ["validation", "code", "tiny"]
    assert all(4.3 < result.loss < 4.9 for result in wanted["float32"])  # ln(97) = 4.57: untrained


def one_by_one(ctx: Any, config: RunConfig) -> tuple[list[float], list[EvalResult]]:
    """Runs in a rank: the sum of losses of each sample alone, and the evaluation."""
    trainer = make_trainer(ctx, config)
    alone = []
    results = []
    for each in trainer.data.sets:
        total = 0.0
        for sample in range(each.batches.num_samples):
            (batch,) = each.batches.rank_batches(sample, 1, 1, 0, 1)
            batches = trainer.engine.upload.token_batches([batch], 1.0)
            total += float(trainer.engine.forward_only(batches))
        alone.append(total)
    for each in trainer.data.sets:
        result = evaluate_set(trainer.engine, each)
        assert result is not None
        results.append(result)
    return alone, results


def test_every_sample_of_a_set_counts_once_and_padding_not_at_all(
    pool: RankPool, folder: Path
) -> None:
    """15, 9 and 1 samples in global batches of 4: against each sample by itself."""
    config = sets_of(folder, "serial", train__dtype="float64", data__document_masks=False)
    ((alone, results),) = pool.run(one_by_one, 1, config)
    assert [result.tokens for result in results] == [15 * 16, 9 * 16, 16]
    for total, result in zip(alone, results, strict=True):
        assert result.loss == pytest.approx(total / result.tokens, rel=1e-13)


@pytest.mark.parametrize("layout", ["serial", "dp2", "pp2"])
def test_a_set_of_the_samples_of_a_step_has_its_loss(
    pool: RankPool, folder: Path, layout: str
) -> None:
    """Without dropout and at rate 0: both losses are the mean over the same ragged tokens."""
    write_tokens(folder / "batch", GLOBAL_BATCH, seed=4)
    config = make_config(
        folder,
        f"same-{layout}",
        layout,
        data__path=str(folder / "batch"),
        data__document_masks=True,
        eval__interval=1,
        eval__sets=[{"name": "seen", "path": str(folder / "batch")}],
        optimizer__lr=0.0,
        train__dtype="float64",
        train__steps=2,
    )
    for (outcome,) in pool.run(train, world_size(config), [(config, None)]):
        assert outcome.code == 0, outcome.error
    trained, evaluated = (lines(folder / config.name, kind) for kind in ("step", "eval"))
    assert len(trained) == len(evaluated) == 2
    for step, result in zip(trained, evaluated, strict=True):
        assert result["tokens"] == step["loss_tokens"] < TOKENS
        assert result["loss"] == pytest.approx(step["loss"], rel=1e-13)


@pytest.mark.long
def test_it_is_done_at_its_interval_and_at_the_end_and_changes_nothing(
    pool: RankPool, folder: Path
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "watched": {"eval__interval": 2, "eval__batches": 2},
        "whole": {"eval__interval": 4},
        "alone": {"eval__interval": 0},
    }
    runs = {
        name: make_config(folder, name, data__split=SPLIT, train__steps=5, **changed)
        for name, changed in changes.items()
    }
    jobs = [(config, None) for config in runs.values()]
    pool.run(train, 1, jobs)
    found = {
        name: [
            (line["step"], line["name"], line["tokens"]) for line in lines(folder / name, "eval")
        ]
        for name in runs
    }
    assert found == {
        "watched": [(step, "validation", 2 * TOKENS) for step in (2, 4, 5)],
        "whole": [(step, "validation", 15 * SEQ_LENGTH) for step in (4, 5)],
        "alone": [],
    }
    assert step_numbers(folder / "watched") == step_numbers(folder / "alone")


def test_a_blend_has_a_set_for_each_source_and_a_test_share_waits_for_the_end(
    pool: RankPool, folder: Path
) -> None:
    sources = [
        {"path": str(folder / "data"), "weight": 0.75},
        {"path": str(folder / "code"), "weight": 0.25, "name": "program"},
    ]
    config = make_config(
        folder,
        "blend",
        data__path=None,
        data__sources=sources,
        data__split="6,2,2",
        train__steps=3,
        eval__interval=2,
    )
    ((outcome,),) = pool.run(train, 1, [(config, None)])
    assert outcome.code == 0
    ids = [sample for step in range(3) for sample in outcome.sample_ids[step]]
    train_samples = 17  # of the first source: 288 of its 481 tokens
    assert sum(sample >= train_samples for sample in ids) == 3  # a quarter of 12
    names = [(line["step"], line["name"]) for line in lines(folder / "blend", "eval")]
    validation = ["validation/data", "validation/program"]
    assert names == [
        *((2, name) for name in validation),
        *((3, name) for name in [*validation, "test/data", "test/program"]),
    ]
    assert all("loss" in line and "tokens" in line for line in lines(folder / "blend", "eval"))
    log = (folder / "blend" / "log.txt").read_text()
    for line in (
        "data data: 288 tokens = 17 samples to train on; this run takes 9 = 0.529 epochs",
        "data program: 87 tokens = 5 samples to train on; this run takes 3 = 0.6 epochs",
        "evaluation validation/data: 5 samples",
        "evaluation test/program at the end: 1 sample",
    ):
        assert line in log


@pytest.mark.long
def test_evaluation_around_resumes_gives_the_lines_of_an_uninterrupted_run(
    pool: RankPool, folder: Path
) -> None:
    options: dict[str, Any] = {"data__split": SPLIT, "eval__interval": 1, "eval__batches": 2}
    straight = make_config(folder, "straight", **options)
    stopped = make_config(folder, "stopped", **options)
    jobs = [(straight, None), (stopped, 2), (stopped, 5), (stopped, None)]
    pool.run(train, 1, jobs)
    wanted, found = (
        [
            json.dumps({key: line[key] for key in ("step", "name", "loss", "tokens")})
            for line in lines(folder / name, "eval")
        ]
        for name in ("straight", "stopped")
    )
    assert len(wanted) == 6
    assert found == wanted


def test_a_stop_at_the_last_step_does_not_lose_the_last_evaluation(
    pool: RankPool, folder: Path
) -> None:
    config = make_config(
        folder, "last", data__split=SPLIT, train__steps=3, eval__interval=2, eval__batches=1
    )
    ((outcome,),) = pool.run(train, 1, [(config, 3)])
    assert outcome.code == 0
    assert [line["step"] for line in lines(folder / "last", "eval")] == [2, 3]


def test_validation_without_a_sample_is_refused_before_step_1(pool: RankPool, folder: Path) -> None:
    config = make_config(folder, "refused", data__split=(0.99, 0.01), eval__interval=1)
    ((outcome,),) = pool.run(train, 1, [(config, None)])
    assert outcome.error.startswith("DataError: ")
    assert "validation gets 5 of 481 tokens" in outcome.error
    assert outcome.sample_ids == {}
    assert not (folder / "refused").exists()


def test_too_few_tokens_of_one_source_are_refused_by_its_name(pool: RankPool, folder: Path) -> None:
    sources = [{"path": str(folder / "data")}, {"path": str(folder / "tiny"), "name": "small"}]
    config = make_config(folder, "refused", data__path=None, data__sources=sources,
                         data__split=(0.5, 0.5))  # fmt: skip
    ((outcome,),) = pool.run(train, 1, [(config, None)])
    assert outcome.error.startswith("DataError: data.sources[1] (small): ")
    assert "train gets 8 of 17 tokens" in outcome.error


def signalled_in_an_evaluation(ctx: Any, config: RunConfig) -> int:
    """Runs in a rank: rank 1 alone gets a signal during the first batch of an evaluation."""
    trainer = make_trainer(ctx, config)
    forward_only = trainer.engine.forward_only

    def forward_and_signal(batches: Any) -> Any:
        if ctx.rank == 1:
            trainer.flag.received.setdefault(signal.SIGTERM, 0.0)
        return forward_only(batches)

    with mock.patch.object(trainer.engine, "forward_only", forward_and_signal):
        return trainer.run()


@pytest.mark.long
def test_a_signal_to_any_rank_cuts_an_evaluation_short_and_the_next_attempt_makes_up_for_it(
    pool: RankPool, folder: Path
) -> None:
    options: dict[str, Any] = {"data__split": SPLIT, "eval__interval": 2, "train__steps": 4}
    config = make_config(folder, "cut", "dp2", **options)
    assert pool.run(signalled_in_an_evaluation, 2, config) == [75, 75]
    run = folder / "cut"
    assert lines(run, "eval") == []
    assert "step     2: evaluation cut short" in (run / "log.txt").read_text()
    assert (lines(run, "end")[-1]["step"], lines(run, "checkpoint")[-1]["step"]) == (2, 2)

    for (outcome,) in pool.run(train, 2, [(config, None)]):
        assert (outcome.code, outcome.first_step) == (0, 2)
    assert [line["step"] for line in lines(run, "eval")] == [2, 4]
