"""When a run saves, and which of its checkpoints it deletes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megalite.checkpoint.disk import Disk
from megalite.checkpoint.find import find_latest
from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.names import checkpoints_of, list_steps, step_name
from megalite.config import RunConfig
from megalite.distributed import comm
from megalite.distributed.agree import Ranks
from megalite.errors import ConfigError
from megalite.planner.storage import checkpoint_bytes, storage_line
from megalite.record.records import lock_folder
from megalite.train.loop import Trainer
from megalite.train.retention import Retention
from tests import ROOT
from tests.checkpoint.kit import rewrite
from tests.pool import RankPool
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    checkpoint_tensors,
    different,
    lines,
    make_config,
    make_trainer,
    step_numbers,
    train,
    world_size,
    write_tokens,
)

TINY: dict[str, Any] = {
    "model__num_layers": 1,
    "optimizer__lr_schedule": "constant",
    "optimizer__warmup_steps": 0,
    "train__steps": 8,
    "checkpoint__keep": 2,
}
FIXTURE_STEP = ROOT / "tests/fixtures/run/runs/before/checkpoints/step-00000006"
EVALUATED: dict[str, Any] = {"data__split": (0.8, 0.2), "eval__interval": 1, "eval__batches": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("retention") / "data"
    return write_tokens(path, 10 * GLOBAL_BATCH)


@pytest.fixture
def make(data: Path, tmp_path: Path) -> Any:
    def config(name: str = "run", layout: str = "serial", **changes: Any) -> RunConfig:
        settings = {**TINY, "data__path": str(data), "checkpoint__interval": 1, **changes}
        return make_config(tmp_path, name, layout, **settings)

    return config


def there(config: RunConfig) -> list[int]:
    return [step for step, _ in list_steps(checkpoints_of(config.folder))]


def run(pool: RankPool, config: RunConfig, stop_at: int | None = None) -> int:
    outcomes = pool.run(train, world_size(config), [(config, stop_at)])
    assert len({(outcome.code, outcome.error) for (outcome,) in outcomes}) == 1
    assert outcomes[0][0].error == ""
    return outcomes[0][0].code or 0


def log_of(config: RunConfig) -> str:
    return (config.folder / "log.txt").read_text()


@pytest.mark.parametrize(
    ("settings", "saved"),
    [
        ({}, [8]),  # every 30 minutes, which such a run does not take
        ({"interval": 0}, [8]),
        ({"interval": 3}, [3, 6, 8]),
        ({"interval_s": 1e-9}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"interval": 0, "interval_s": 1e-9}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"interval": 3, "interval_s": 1e9}, [3, 6, 8]),
    ],
)
def test_the_first_interval_that_is_due_saves(
    pool: RankPool, tmp_path: Path, data: Path, settings: dict[str, Any], saved: list[int]
) -> None:
    changes = {f"checkpoint__{name}": value for name, value in settings.items()}
    config = make_config(
        tmp_path, "run", **{**TINY, "data__path": str(data), "checkpoint__keep": 9, **changes}
    )
    assert run(pool, config) == 0
    assert there(config) == saved


def test_an_interval_of_0_that_is_written_saves_nothing_by_time(tmp_path: Path) -> None:
    def seconds(**changes: Any) -> float:
        return make_config(tmp_path, "run", **changes).checkpoint.interval_s

    assert seconds() == seconds(checkpoint__interval=500) == 1800
    assert seconds(checkpoint__interval=0) == 0
    assert seconds(checkpoint__interval=0, checkpoint__interval_s=60.0) == 60


def saved_by_the_clock_of(ctx: Any, config: RunConfig, due: dict[int, list[int]]) -> list[int]:
    """Runs in a rank: each rank has another clock; the steps that were saved."""
    trainer, saved = make_trainer(ctx, config), []
    save = trainer._save

    def listen() -> None:
        saved.append(trainer.step)
        save()

    trainer._save = listen
    elapsed = partial(lambda at: 1e9 * (at.step + 1 in due[ctx.rank]), trainer.at)
    with mock.patch.object(Trainer, "_elapsed_s", property(lambda self: elapsed())):
        assert trainer.run() == 0
    return saved


def num_operations(ctx: Any, config: RunConfig) -> int:
    """Runs in a rank: the operations between ranks of a whole run."""
    trainer = make_trainer(ctx, config)
    before = trainer.mesh.ledger.num_ops
    assert trainer.run() == 0
    return trainer.mesh.ledger.num_ops - before


def test_the_clock_of_rank_0_counts_and_costs_no_exchange(pool: RankPool, make: Any) -> None:
    never = make("never", "dp2", checkpoint__interval=0)
    timed = make("timed", "dp2", checkpoint__interval=0, checkpoint__interval_s=60.0)
    found = pool.run(saved_by_the_clock_of, 2, timed, {0: [2, 5], 1: [3]})
    assert found == [[2, 5, 8]] * 2
    shutil.rmtree(timed.folder)
    assert pool.run(num_operations, 2, timed) == pool.run(num_operations, 2, never)


def test_saves_by_time_leave_the_numbers_and_the_resume_as_they_are(
    pool: RankPool, make: Any
) -> None:
    options = {**EVALUATED, "checkpoint__interval": 0}
    straight = make("straight", **options)
    timed = make("timed", **options, checkpoint__interval_s=1e-9)
    assert [run(pool, straight), run(pool, timed, 3), run(pool, timed)] == [0, 75, 0]
    assert step_numbers(timed.folder) == step_numbers(straight.folder)
    tensors = checkpoint_tensors(straight.folder, 8)
    assert different(tensors, checkpoint_tensors(timed.folder, 8)) == []
    kinds = [
        line["kind"]
        for kind in ("checkpoint", "eval")
        for line in lines(timed.folder, kind)
        if line["step"] == 5
    ]
    assert kinds == ["checkpoint", "eval"]


def test_the_newest_and_one_of_each_so_many_stay(pool: RankPool, make: Any) -> None:
    config = make(layout="dp2", checkpoint__keep_every=3)
    assert run(pool, config, 5) == 75
    assert there(config) == [3, 4, 5]
    assert run(pool, config) == 0
    assert there(config) == [3, 6, 7, 8]
    assert "step     4: deleted step-00000002\n" in log_of(config)
    assert not [p for p in checkpoints_of(config.folder).iterdir() if p.name.startswith(".")]
    assert (checkpoints_of(config.folder) / "latest").read_text() == "step-00000008\n"


def losses(config: RunConfig) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(config.folder, "eval")}


def test_the_best_stays_over_restarts(pool: RankPool, make: Any) -> None:
    """The first is the best, as the rate is far too high for what comes after."""
    options = {**EVALUATED, "optimizer__lr": 3.0, "checkpoint__keep": 1, "train__steps": 4}
    config = make(**options, checkpoint__keep_best="validation")
    for stop in (1, 2, 3, None):
        run(pool, config, stop)
        found = losses(config)
        if found:  # the evaluation of a step at which the run leaves is made up for
            best = min(found, key=lambda step: found[step])
            assert there(config) == sorted({best, stop or 4}), found
    assert best == 1
    assert found.keys() == {1, 2, 3, 4}


def dies_at(ctx: Any, config: RunConfig, step: int) -> str:
    """Runs in a rank: the process ends in the step after `step`, which was saved and evaluated."""
    trainer = make_trainer(ctx, config)
    take = trainer._step

    def step_or_die(flag: Any) -> Any:
        if trainer.step == step:
            raise RuntimeError("killed")
        return take(flag)

    trainer._step = step_or_die
    with pytest.raises(RuntimeError, match="killed"):
        trainer.run()
    return "killed"


def test_an_evaluation_that_only_the_record_has_counts(pool: RankPool, make: Any) -> None:
    """The process died between the evaluation and the next save, which would have kept it."""
    options = {**EVALUATED, "optimizer__lr": 3.0, "checkpoint__keep": 1, "train__steps": 4}
    config = make(layout="dp2", **options, checkpoint__keep_best="validation")
    assert pool.run(dies_at, 2, config, 1) == ["killed"] * 2
    assert losses(config).keys() == {1}
    run(pool, config)
    found = losses(config)
    assert min(found, key=lambda step: found[step]) == 1
    assert there(config) == [1, 4]
    assert len(lines(config.folder, "eval")) == 4


def test_without_its_record_the_losses_of_the_checkpoints_count(pool: RankPool, make: Any) -> None:
    options = {**EVALUATED, "optimizer__lr": 3.0, "checkpoint__keep": 1, "train__steps": 4}
    config = make(**options, checkpoint__keep_best="validation")
    run(pool, config, 3)
    assert there(config) == [1, 3]
    (config.folder / "metrics.jsonl").unlink()
    run(pool, config)
    assert there(config) == [1, 4]


def test_each_evaluation_has_its_checkpoint_to_be_best(pool: RankPool, make: Any) -> None:
    options = {**EVALUATED, "eval__interval": 3, "checkpoint__keep": 9}
    config = make(**options, checkpoint__interval=0, checkpoint__keep_best="validation")
    run(pool, config)
    assert there(config) == sorted(losses(config)) == [3, 6, 8]


def test_an_evaluation_that_a_signal_cut_short_still_counts(pool: RankPool, make: Any) -> None:
    """The checkpoint whose evaluation is made up for after a restart can be the best."""
    options = {**EVALUATED, "optimizer__lr": 3.0, "checkpoint__keep": 1, "train__steps": 4}
    config = make(**options, checkpoint__keep_best="validation")
    run(pool, config, 1)  # leaves without the evaluation of step 1
    assert losses(config) == {}
    run(pool, config)
    found = losses(config)
    assert min(found, key=lambda step: found[step]) == 1
    assert there(config) == [1, 4]


def forget_keep(body: Any) -> None:
    for name in ("keep", "keep_every", "keep_best", "interval_s"):
        del body["config"]["checkpoint"][name]


def test_checkpoints_of_before_are_counted_and_never_deleted(pool: RankPool, make: Any) -> None:
    config = make(checkpoint__keep=9)
    run(pool, config, 3)
    for _, path in list_steps(checkpoints_of(config.folder)):
        rewrite(path, forget_keep)
    later = make(checkpoint__keep=1)
    run(pool, later)
    assert there(later) == [1, 2, 3, 8]
    assert "3 more in " in log_of(later)
    assert "are never deleted (saved by a version without checkpoint.keep" in log_of(later)


def test_links_and_what_lies_outside_the_run_folder_stay(
    pool: RankPool, make: Any, tmp_path: Path
) -> None:
    config = make(checkpoint__keep=1)
    run(pool, config, 3)
    root = checkpoints_of(config.folder)
    (root / step_name(3)).rename(tmp_path / "elsewhere")
    (root / step_name(3)).symlink_to(tmp_path / "elsewhere")
    run(pool, config, 5)
    assert there(config) == [3, 5]
    assert list((tmp_path / "elsewhere").iterdir())

    # The same with the whole folder on another disk.
    root.rename(tmp_path / "disk")
    root.symlink_to(tmp_path / "disk")
    run(pool, config)
    assert there(config) == [3, 5, 6, 7, 8]
    assert "2 more in " in log_of(config)


def test_a_link_within_the_run_folder_stays(pool: RankPool, make: Any) -> None:
    config = make(checkpoint__keep=1)
    run(pool, config, 3)
    path = checkpoints_of(config.folder) / step_name(3)
    path.rename(config.folder / "mine")
    path.symlink_to(config.folder / "mine")
    run(pool, config)
    assert there(config) == [3, 8]


def test_the_one_that_load_weights_names_stays(pool: RankPool, make: Any) -> None:
    config = make(checkpoint__keep=1)
    source = checkpoints_of(config.folder) / step_name(2)
    run(pool, config, 2)
    rewrite(source, lambda body: body["state"]["trainer"].pop("weights_from"))
    run(pool, make(checkpoint__keep=1, checkpoint__load_weights=str(source)))
    assert there(config) == [2, 8]


def test_damaged_ones_are_not_counted_and_those_above_go_after_the_next_save(
    pool: RankPool, make: Any
) -> None:
    config = make(checkpoint__interval=2, checkpoint__keep=3)
    run(pool, config, 6)
    root = checkpoints_of(config.folder)
    shards = {step: next((root / step_name(step)).glob("*.safetensors")) for step in (2, 6)}
    shards[2].write_bytes(b"")
    shards[6].write_bytes(bytes(shards[6].stat().st_size))  # of the right size

    class Watching(Disk):
        def remove(self, path: Path) -> None:
            if path.exists():
                found = find_latest(root)
                assert found is not None
                assert found.manifest.step >= 5
            super().remove(path)

    with mock.patch("megalite.train.retention.Disk", Watching):
        run(pool, config, 5)
    assert there(config) == [4, 5]
    assert "step     5: deleted step-00000002, step-00000006\n" in log_of(config)


def fails_to_delete(ctx: Any, config: RunConfig) -> int:
    """Runs in a rank: nothing can be deleted."""
    trainer = make_trainer(ctx, config)
    error = OSError(13, "Permission denied")
    with mock.patch.object(Disk, "remove", side_effect=error, autospec=True):
        trainer.retention._disk = Disk()
        with mock.patch("megalite.checkpoint.store.write_latest"):
            return trainer.run()


def test_a_deletion_that_fails_is_a_warning(pool: RankPool, make: Any) -> None:
    config = make(layout="dp2", checkpoint__keep=1, checkpoint__interval=4)
    assert pool.run(fails_to_delete, 2, config) == [0, 0]
    assert there(config) == [4, 8]
    assert "warning: step 8: older checkpoints were not deleted: " in log_of(config)


def test_nothing_goes_before_the_newer_one_reads_back(make: Any, tmp_path: Path) -> None:
    config = make(checkpoint__keep=1)
    shutil.copytree(FIXTURE_STEP, checkpoints_of(config.folder) / step_name(6))
    printed: list[str] = []
    log = mock.Mock(is_open=True, print=printed.append)
    retention = Retention(config, log)
    retention._own = {6: checkpoints_of(config.folder) / step_name(6)}
    (checkpoints_of(config.folder) / step_name(9)).mkdir()
    retention.clean_up(9, {}, Ranks())
    assert there(config) == [6, 9]
    assert printed[0].startswith("warning: step 9: older checkpoints were not deleted: ")


def saves_damaged(ctx: Any, config: RunConfig) -> int:
    """Runs in a rank: the last save has one wrong byte in each file, of the right size."""
    trainer = make_trainer(ctx, config)
    save = trainer._save

    def save_and_damage() -> None:
        save()
        folder = checkpoints_of(config.folder) / step_name(trainer.step)
        mine = sorted(folder.glob("*.safetensors"))[trainer.mesh.rank :: trainer.mesh.world.size]
        for shard in mine if trainer.at.is_last else ():
            content = bytearray(shard.read_bytes())
            content[-1] ^= 1
            shard.write_bytes(content)
        comm.barrier(trainer.mesh.world)

    with mock.patch.object(trainer, "_save", save_and_damage):
        return trainer.run()


def test_nothing_goes_while_a_byte_of_the_newer_one_is_wrong(pool: RankPool, make: Any) -> None:
    config = make(layout="dp2", checkpoint__keep=1, checkpoint__interval=4)
    assert pool.run(saves_damaged, 2, config) == [0, 0]
    assert there(config) == [4, 8]
    assert "older checkpoints were not deleted: checkpoint step-00000008: " in log_of(config)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model__tie_embeddings": True},
        {"train__dtype": "bfloat16", "optimizer__ema_decay": 0.9},
        {"train__dtype": "float64"},
        {"optimizer__name": "muon", "optimizer__moment_dtype": "bfloat16"},
    ],
)
def test_the_bytes_are_those_of_a_real_checkpoint(
    pool: RankPool, make: Any, options: dict[str, Any]
) -> None:
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    config = make(layout="zero1", **options)
    run(pool, config, 1)
    manifest = read_manifest(checkpoints_of(config.folder) / step_name(1))
    found = 0
    for tensor in manifest.tensors.values():
        numel = 1
        for size in tensor.shape:
            numel *= size
        found += numel * sizes[tensor.dtype]
    assert checkpoint_bytes(config) == found
    assert f"checkpoints: {storage_line(config, 8)}\n" in log_of(config)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "every 30 min, newest 2 kept; 170 kB each, at most 510 kB for this run"),
        ({"interval": 0}, "at the end and on a signal, newest 2 kept; "),
        ({"interval": 500, "interval_s": 45.0}, "every 500 steps or 45 s, newest 2 kept; "),
        (
            {"interval": 500, "interval_s": 0.0, "keep_every": 5},
            "every 500 steps, newest 2 kept + the first of each 5 steps; 170 kB each, at most 851",
        ),
        ({"interval": 1, "interval_s": 90.0, "keep_every": 1}, "every step or 90 s, all kept; "),
        ({"interval_s": 7200.0}, "every 2 h, "),
        (
            {"keep_best": "validation"},
            "newest 2 kept + the best by validation, saved before each evaluation; 170 kB each, "
            "at most 680 kB for this run",
        ),
    ],
)
def test_the_line_says_when_what_and_how_much(
    tmp_path: Path, settings: dict[str, Any], line: str
) -> None:
    changes = {f"checkpoint__{name}": value for name, value in settings.items()}
    config = make_config(tmp_path, "run", **{**TINY, **EVALUATED, **changes})
    assert line in storage_line(config, 10)


def resumed_while_another_saves(ctx: Any, config: RunConfig) -> str:
    """Runs in a rank: while the run looks for its checkpoint, its folder is in use; the error."""
    ended = lock_folder(config.folder, print)
    trainer = make_trainer(ctx, config)
    resume = trainer._resume

    def end_and_resume() -> None:
        resume()
        ended.close()  # the other run has saved, and ends

    patched = mock.patch.object(trainer, "_resume", end_and_resume)
    with patched, pytest.raises(ConfigError) as caught:
        trainer.run()
    ended.close()
    return str(caught.value)


def test_a_run_that_another_one_has_in_use_is_refused_before_its_checkpoint_is_found(
    pool: RankPool, make: Any
) -> None:
    config = make()
    assert run(pool, config, 3) == 75
    (error,) = pool.run(resumed_while_another_saves, 1, config)
    assert "is in use by another run" in error
    assert run(pool, config) == 0
