"""A run that began from another run's weights, started again: what it began from is on record."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.config import RunConfig
from megalite.errors import CheckpointError
from megalite.train.start_checks import require_resumable, start_problems
from tests.checkpoint.kit import rewrite
from tests.pool import RankPool
from tests.train.kit.runs import GLOBAL_BATCH, make_config, train, write_tokens

TINY: dict[str, Any] = {"model__num_layers": 1, "train__steps": 4}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """Runs "a" and "b" of two steps, "from-a" that began from a, and "new", both stopped at 1."""
    folder = tmp_path_factory.mktemp("origin")
    write_tokens(folder / "data", 3 * GLOBAL_BATCH)
    jobs: list[tuple[RunConfig, int]] = [(make_config(folder, name, **TINY), 2) for name in "ab"]
    jobs += [(named(folder, "from-a", "a"), 1), (make_config(folder, "new", **TINY), 1)]
    (outcomes,) = pool.run(train, 1, jobs)
    assert [outcome.code for outcome in outcomes] == [75] * 4
    return folder


@pytest.fixture
def folder(begun: Path) -> Path:
    """A copy in the place of the original, which the record names."""
    kept = begun.with_name("kept")
    if not kept.exists():
        shutil.copytree(begun, kept)
    shutil.rmtree(begun)
    return Path(shutil.copytree(kept, begun))


def named(folder: Path, name: str, source: str, **changes: Any) -> RunConfig:
    path = source if source.startswith("/") else str(folder / source)
    return make_config(folder, name, **{**TINY, "checkpoint__load_weights": path, **changes})


def resumed(pool: RankPool, config: RunConfig) -> list[str]:
    """Lines of the log of an attempt that resumes at step 1 and stops at 2."""
    assert start_problems(config) == []
    require_resumable(config, frozenset())
    (((done,),)) = pool.run(train, 1, [(config, 2)])
    assert (done.code, done.error, done.first_step) == (75, "", 1)
    return (config.folder / "log.txt").read_text().splitlines()


def refused(pool: RankPool, config: RunConfig) -> str:
    """The error on both ranks, which is the one before they start."""
    with pytest.raises(CheckpointError) as caught:
        require_resumable(config, frozenset())
    two = make_config(
        Path(config.out), config.name, "dp2", **TINY,
        checkpoint__load_weights=config.checkpoint.load_weights,
    )  # fmt: skip
    outcomes = [outcome for (outcome,) in pool.run(train, 2, [(two, None)])]
    assert all(str(caught.value) in outcome.error for outcome in outcomes)
    assert all(outcome.sample_ids == {} for outcome in outcomes)
    return str(caught.value)


def test_the_same_command_resumes_and_says_so(pool: RankPool, folder: Path) -> None:
    config = named(folder, "from-a", "a")
    assert (
        f"resumes from step 1; checkpoint.load_weights={folder / 'a'} was read at step 0"
        in resumed(pool, config)
    )
    shown = CliRunner().invoke(app, ["info", str(config.folder / "checkpoints")]).output
    newest = folder / "a" / "checkpoints" / "step-00000002"
    assert f"began from   {folder / 'a'} ({newest})\n" in shown


@pytest.mark.parametrize("change", ["trained on", "gone", "no record of its own"])
def test_the_same_command_resumes_whatever_became_of_the_source(
    pool: RankPool, folder: Path, change: str
) -> None:
    if change == "gone":
        shutil.rmtree(folder / "a")
    elif change == "trained on":
        pool.run(train, 1, [(make_config(folder, "a", **TINY), None)])
        shutil.rmtree(folder / "a" / "checkpoints" / "step-00000002")
    else:
        rewrite(folder / "from-a" / "checkpoints" / "step-00000001", forget)
    lines = resumed(pool, named(folder, "from-a", "a"))
    text = "is not on record" if change == "no record of its own" else "was read at step 0"
    assert [line for line in lines if "load_weights" in line and text in line]


def forget(body: Any) -> None:
    del body["state"]["trainer"]["weights_from"]


@pytest.mark.parametrize("path", ["moved", "moved/checkpoints", "moved/checkpoints/step-00000002"])
def test_the_same_checkpoint_elsewhere_is_the_same_source(
    pool: RankPool, folder: Path, path: str
) -> None:
    (folder / "a").rename(folder / "moved")
    assert any(
        "was read at step 0" in line for line in resumed(pool, named(folder, "from-a", path))
    )


def test_another_source_is_refused_with_both_names(pool: RankPool, folder: Path) -> None:
    error = refused(pool, named(folder, "from-a", "b"))
    assert error.startswith(f"checkpoint.load_weights={folder / 'b'} would not be read: ")
    assert f"its run began from {folder / 'a'} ({folder / 'a'}/checkpoints/step-00000002)" in error
    assert error.endswith("to go on, or give the run another name")
    assert "its run began from initial weights" in refused(pool, named(folder, "new", "a"))
    assert refused(pool, named(folder, "from-a", "nowhere"))


def test_without_the_setting_it_resumes_and_keeps_the_record(pool: RankPool, folder: Path) -> None:
    plain = make_config(folder, "from-a", **TINY)
    jobs = [(plain, 2), (named(folder, "from-a", "a"), 3)]
    assert [done.code for done in pool.run(train, 1, jobs)[0]] == [75, 75]
    log = (plain.folder / "log.txt").read_text()
    assert log.count("was read at step 0") == 1


def test_weights_that_are_not_there_are_a_line_before_the_start(folder: Path) -> None:
    (line,) = start_problems(named(folder, "another", "nowhere"))
    assert line.startswith(f"checkpoint.load_weights={folder / 'nowhere'}: no such folder below ")
