"""What must not start: another run under the same name, the wrong checkpoint, the wrong data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megalite.config.names import toml_value
from tests.pool import RankPool
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    VOCAB,
    Outcome,
    different_datasets,
    lines,
    make_config,
    step_numbers,
    train,
    world_size,
    write_tokens,
)

CURVE: dict[str, Any] = {"optimizer__min_lr": 1e-3}  # a decay that can be trained beyond


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """A folder with data and a run "run" that stopped at step 2 of 6, checkpoints at 1 and 2."""
    folder = tmp_path_factory.mktemp("refusals")
    write_tokens(folder / "data", 3 * GLOBAL_BATCH)
    config = make_config(folder, "run", checkpoint__interval=1, **CURVE)
    (outcomes,) = pool.run(train, 1, [(config, 2)])
    assert outcomes[0].code == 75
    return folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "copy"))


def one(pool: RankPool, folder: Path, name: str = "run", **changes: Any) -> Outcome:
    config = make_config(folder, name, **{**CURVE, **changes})
    ranks = pool.run(train, world_size(config), [(config, None)])
    assert len({(outcome.code, outcome.error) for (outcome,) in ranks}) == 1
    outcome: Outcome = ranks[0][0]
    if outcome.error:
        assert outcome.sample_ids == {}, "it took a step"
    return outcome


CHANGES: dict[str, Any] = {
    "optimizer.lr": 2e-2,
    "optimizer.beta2": 0.99,
    "train.seed": 5,
    "model.ffn_hidden_size": 64,
    "train.global_batch": 2 * GLOBAL_BATCH,
    "data.seq_length": 8,
    "train.dtype": "float64",
}
NEVER = ("model.ffn_hidden_size", "data.seq_length")


def test_settings_that_make_it_another_run_are_named_all_at_once(
    pool: RankPool, folder: Path
) -> None:
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    changes = {key.replace(".", "__"): value for key, value in CHANGES.items()}
    outcome = one(pool, folder, **changes)
    first, *told, last = outcome.error.splitlines()
    assert first == "CheckpointError: step-00000002 was saved with other settings"
    for name, value in CHANGES.items():
        (line,) = [line for line in told if line.startswith(f"{name} is {toml_value(value)}, ")]
        assert line.endswith(" (cannot change within a run)") == (name in NEVER)
    assert len(told) == len(CHANGES)
    assert last == "restore the settings, or start a run with another name"
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before


def test_settings_that_change_no_number_are_free(pool: RankPool, folder: Path) -> None:
    outcome = one(
        pool,
        folder,
        train__micro_batch=2,
        train__recompute="full",
        optimizer__zero=1,
        optimizer__bucket_mb=1.0,
        model__head_dim=8,  # what it was when it was open
        log__interval=3,
        checkpoint__interval=0,
        parallel__dp=2,
    )
    assert (outcome.code, outcome.first_step) == (0, 2)


@pytest.mark.parametrize(
    ("changes", "steps", "ok"),
    [
        ({}, 8, False),
        ({"optimizer__decay_steps": 6}, 8, True),
        ({"optimizer__decay_steps": 8}, 6, False),
        ({"optimizer__lr_schedule": "linear"}, 6, False),
    ],
)
def test_longer_training_is_allowed_where_it_moves_no_learning_rate(
    pool: RankPool, folder: Path, changes: dict[str, Any], steps: int, ok: bool
) -> None:
    outcome = one(pool, folder, train__steps=steps, **changes)
    if ok:
        assert outcome.code == 0
        assert lines(folder / "run", "step")[-1]["step"] == steps
    else:
        (name,) = changes or ["train__steps"]
        assert f"{name.replace('__', '.')} is " in outcome.error
        if "schedule" not in name:
            assert "keep its curve with optimizer.decay_steps=6" in outcome.error


def test_fewer_steps_than_are_done_are_refused(pool: RankPool, folder: Path) -> None:
    outcome = one(pool, folder, train__steps=1, optimizer__warmup_steps=1)
    assert "step-00000002 is beyond train.steps=1" in outcome.error


def test_resume_must_and_never_mean_it(pool: RankPool, folder: Path) -> None:
    missing = one(pool, folder, "unknown", checkpoint__resume="must")
    assert missing.error.startswith('CheckpointError: checkpoint.resume="must"')
    assert not (folder / "unknown").exists()
    present = one(pool, folder, checkpoint__resume="never")
    assert present.error.startswith('CheckpointError: checkpoint.resume="never"')
    assert "step-00000002" in present.error
    assert one(pool, folder, checkpoint__resume="must").code == 0


def test_data_replaced_in_place_is_noticed(pool: RankPool, folder: Path) -> None:
    write_tokens(folder / "data", 3 * GLOBAL_BATCH, seed=1)
    outcome = one(pool, folder, train__micro_batch=2)
    assert outcome.error.startswith("CheckpointError: ")
    assert "fingerprint" in outcome.error
    assert str(folder / "data") in outcome.error


def test_ranks_with_different_data_stop_together(pool: RankPool, tmp_path: Path) -> None:
    for rank in range(2):
        write_tokens(tmp_path / f"host-{rank}" / "data", 8, seed=rank)
    outcomes = pool.run(different_datasets, 2, str(tmp_path))
    for rank, error in enumerate(outcomes):
        assert error.startswith("DataError: ranks see different datasets at data.path=")
        assert f"host-{rank}" in error


@pytest.mark.long
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_message(
    pool: RankPool, folder: Path, stopped: Path
) -> None:
    newest = folder / "run" / "checkpoints" / "step-00000002"
    shard = next(newest.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    straight = make_config(folder, "straight", **CURVE)
    outcomes = pool.run(train, 1, [(make_config(folder, "run", **CURVE), None), (straight, None)])[
        0
    ]
    assert [outcome.first_step for outcome in outcomes] == [1, 0]
    log = (folder / "run" / "log.txt").read_text()
    assert f"passed over: checkpoint {newest.name}: {shard} is damaged" in log
    first, second = (
        [s for s in lines(folder / "run", "step") if s["attempt"] == n] for n in (1, 2)
    )
    assert [line["step"] for line in first] == [1, 2]
    assert [line["step"] for line in second] == [2, 3, 4, 5, 6]
    assert step_numbers(folder / "run")[2:] == step_numbers(folder / "straight")[1:]


def test_a_checkpoint_folder_without_a_sound_one_starts_nothing(
    pool: RankPool, folder: Path
) -> None:
    for manifest in (folder / "run" / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{}")
    outcome = one(pool, folder)
    assert outcome.error.startswith("CheckpointError: no checkpoint in")


def test_ids_beyond_the_vocabulary_are_refused_before_step_1(pool: RankPool, folder: Path) -> None:
    outcome = one(pool, folder, "small", model__vocab_size=VOCAB - 1)
    assert outcome.error.startswith("DataError: ")
    assert "model.vocab_size=96" in outcome.error


def test_a_run_folder_that_cannot_be_made_is_a_setting_to_change(
    pool: RankPool, folder: Path
) -> None:
    (folder / "occupied").write_text("a file")
    outcome = one(pool, folder, "occupied")
    assert outcome.error.startswith("ConfigError: run folder")
    assert "change out or name" in outcome.error


def test_a_save_that_fails_ends_all_ranks_and_says_so_in_the_run_folder(
    pool: RankPool, folder: Path
) -> None:
    run = folder / "unsaved"
    run.mkdir()
    (run / "checkpoints").write_text("no folder")
    config = make_config(folder, "unsaved", "tp2", checkpoint__interval=2)
    errors = {outcome.error for (outcome,) in pool.run(train, 2, [(config, None)])}
    assert len(errors) == 1
    assert errors.pop().startswith("CheckpointError: saving step 2: rank 0: ")
    (end,) = lines(run, "end")
    assert (end["step"], end["exit_code"]) == (2, 2)
    assert end["reason"].startswith("CheckpointError: saving step 2")
