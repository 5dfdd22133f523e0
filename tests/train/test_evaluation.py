"""The validation loss: one number at every layout, at the right steps, without side effects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.config import RunConfig
from tests.pool import RankPool
from tests.train.kit import (
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

# 30 samples: 15 for training; 14 full validation samples are 3 global batches.
SPLIT = (0.5, 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluation")
    write_tokens(path / "data", 30)
    return path


def evaluate(ctx: Any, config: RunConfig) -> float:
    return make_trainer(ctx, config).evaluate()


@pytest.mark.parametrize("layout", ["dp2", "dp4", "tp2", "pp2", "interleaved", "3d"])
def test_the_loss_does_not_depend_on_the_layout(pool: RankPool, folder: Path, layout: str) -> None:
    # document masks leave ranks with different numbers of valid tokens
    options = {
        "train__dtype": "float64",
        "data__split": SPLIT,
        "data__document_masks": True,
        "eval__interval": 1,
    }
    (wanted,) = pool.run(evaluate, 1, make_config(folder, "serial", **options))
    config = make_config(folder, layout, layout, **options)
    found = pool.run(evaluate, world_size(config), config)
    assert wanted == pytest.approx(4.6, abs=0.3)  # ln(97) = 4.57: untrained
    assert found == pytest.approx([wanted] * len(found), rel=1e-12)


def test_it_is_done_at_its_interval_and_at_the_end_and_changes_nothing(
    pool: RankPool, folder: Path
) -> None:
    runs = {
        name: make_config(
            folder, name, data__split=SPLIT, train__steps=5, eval__interval=interval, **batches
        )
        for name, interval, batches in (
            ("watched", 2, {"eval__batches": 2}),
            ("whole", 4, {}),
            ("alone", 0, {}),
        )
    }
    jobs = [(config, None) for config in runs.values()]
    pool.run(train, 1, jobs)
    tokens = GLOBAL_BATCH * SEQ_LENGTH
    found = {
        name: [
            (line["step"], line["name"], line["tokens"]) for line in lines(folder / name, "eval")
        ]
        for name in runs
    }
    assert found == {
        "watched": [(step, "validation", 2 * tokens) for step in (2, 4, 5)],
        "whole": [(step, "validation", 3 * tokens) for step in (4, 5)],
        "alone": [],
    }
    assert step_numbers(folder / "watched") == step_numbers(folder / "alone")


def test_a_stop_at_the_last_step_does_not_lose_the_last_evaluation(
    pool: RankPool, folder: Path
) -> None:
    config = make_config(
        folder, "last", data__split=SPLIT, train__steps=3, eval__interval=2, eval__batches=1
    )
    ((outcome,),) = pool.run(train, 1, [(config, 3)])
    assert outcome.code == 0
    assert [line["step"] for line in lines(folder / "last", "eval")] == [2, 3]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ((0.95, 0.05), "fewer than train.global_batch=4; raise the second share"),
        ((0.99, 0.01), "validation gets 5 of 481 tokens"),
    ],
)
def test_too_little_validation_data_is_refused_before_step_1(
    pool: RankPool, folder: Path, split: tuple[float, float], message: str
) -> None:
    config = make_config(folder, "refused", data__split=split, eval__interval=1)
    ((outcome,),) = pool.run(train, 1, [(config, None)])
    assert outcome.error.startswith("DataError: ")
    assert message in outcome.error
    assert outcome.sample_ids == {}
    assert not (folder / "refused").exists()


def test_no_validation_share_is_refused_before_step_1(pool: RankPool, folder: Path) -> None:
    config = make_config(folder, "refused", data__split=SPLIT, eval__interval=1)
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"split": (1.0, 0.0)})}
    )
    ((outcome,),) = pool.run(train, 1, [(config, None)])
    assert outcome.error.startswith("DataError: eval.interval=1, but data.split=(1.0, 0.0) leaves")
