"""The order of data around restarts: the same at every layout, epoch after epoch, from any step."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megalite.config import RunConfig
from megalite.train.changes import changed_data
from tests.pool import RankPool
from tests.train.kit.runs import Outcome, lines, make_config, train, world_size, write_tokens

pytestmark = pytest.mark.long

FIRST, SECOND = 10, 3  # samples of the two sources: epochs end within steps
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("order")
    write_tokens(path / "data", FIRST)
    write_tokens(path / "small", SECOND, seed=1)
    return path


def blended(folder: Path, name: str, layout: str, **changes: Any) -> RunConfig:
    sources = [
        {"path": str(folder / "data"), "weight": 3},
        {"path": str(folder / "small"), "weight": 1},
    ]
    return make_config(
        folder,
        name,
        layout,
        **{
            "data__path": None,
            "data__sources": sources,
            "train__steps": STEPS,
            "optimizer__lr_schedule": "constant",
        }
        | changes,
    )


def order(ranks: list[list[Outcome]], step: int) -> list[int]:
    """Sample ids of a step in global order, from ranks that are dp ranks only."""
    return [sample for (outcome,) in ranks for sample in outcome.sample_ids[step]]


def run(pool: RankPool, config: RunConfig, stop_at: int | None = None) -> list[list[Outcome]]:
    ranks = pool.run(train, world_size(config), [(config, stop_at)])
    assert all(outcome.code == (75 if stop_at else 0) for (outcome,) in ranks), ranks
    return ranks


def test_a_blend_goes_on_in_the_same_order_at_fewer_ranks_within_later_epochs(
    pool: RankPool, folder: Path
) -> None:
    straight = run(pool, blended(folder, "straight", "serial"))
    wanted = [order(straight, step) for step in range(STEPS)]
    found: list[list[int]] = []
    for layout, workers, stop in (("dp4", 2, 4), ("dp2", 1, 7), ("serial", 0, None)):
        config = blended(folder, "moved", layout, data__workers=workers)
        ranks = run(pool, config, stop)
        steps = sorted(ranks[0][0].sample_ids)
        assert steps == list(range(len(found), stop or STEPS))
        found += [order(ranks, step) for step in steps]
    assert found == wanted

    flat = [sample for step in wanted for sample in step]
    first = [sample for sample in flat if sample < FIRST]
    second = [sample - FIRST for sample in flat if sample >= FIRST]
    assert (len(first), len(second)) == (36, 12)  # of 48, three to one
    for samples, size in ((first, FIRST), (second, SECOND)):
        epochs = [samples[start : start + size] for start in range(0, len(samples), size)]
        whole = [epoch for epoch in epochs if len(epoch) == size]
        assert len(whole) >= 3
        assert all(sorted(epoch) == list(range(size)) for epoch in whole)
        assert len({tuple(epoch) for epoch in whole}) > 1, "each epoch has its own order"
    assert max(Counter(first).values()) - min(Counter(first).values()) <= 1


def test_a_longer_run_starts_with_the_samples_of_a_shorter_one(
    pool: RankPool, folder: Path
) -> None:
    short = run(pool, blended(folder, "short", "serial", train__steps=3))
    longer = run(pool, blended(folder, "longer", "serial", train__steps=6))
    assert [order(longer, step) for step in range(3)] == [order(short, step) for step in range(3)]


def test_a_source_replaced_in_place_with_its_size_and_time_is_noticed(
    pool: RankPool, tmp_path: Path
) -> None:
    write_tokens(tmp_path / "data", FIRST)
    write_tokens(tmp_path / "small", SECOND, seed=1)
    run(pool, blended(tmp_path, "run", "serial"), 2)
    before = (tmp_path / "small.bin").stat()
    content = (tmp_path / "small.bin").read_bytes()
    (tmp_path / "small.bin").write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))
    os.utime(tmp_path / "small.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    after = (tmp_path / "small.bin").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    config = blended(tmp_path, "run", "serial")
    ((outcome,),) = pool.run(train, 1, [(config, None)])
    assert outcome.error.startswith("CheckpointError: ")
    assert "fingerprints of small, " in outcome.error
    assert "fingerprints of data, " not in outcome.error
    assert "--accept data" in outcome.error
    assert outcome.sample_ids == {}


def test_three_samples_and_a_global_batch_of_four_train_on_whole_epochs(
    pool: RankPool, tmp_path: Path
) -> None:
    write_tokens(tmp_path / "data", 3)
    orders = []
    for layout, micro_batch in (("serial", 4), ("serial", 1), ("dp2", 2), ("dp4", 1)):
        name = f"{layout}-{micro_batch}"
        config = make_config(tmp_path, name, layout, train__micro_batch=micro_batch)
        ranks = run(pool, config)
        orders.append([sample for step in range(6) for sample in order(ranks, step)])
        assert [line["loss_tokens"] for line in lines(tmp_path / name, "step")] == [4 * 16] * 6
    assert all(found == orders[0] for found in orders)
    epochs = [sorted(orders[0][start : start + 3]) for start in range(0, 24, 3)]
    assert epochs == [[0, 1, 2]] * 8


def test_sources_may_move_but_neither_their_weights_nor_their_content_change_unnoticed(
    pool: RankPool, tmp_path: Path
) -> None:
    for place in ("one", "two"):
        write_tokens(tmp_path / place / "data", FIRST)
        write_tokens(tmp_path / place / "small", SECOND, seed=1)

    def config(place: str, weight: float = 1, **changes: Any) -> RunConfig:
        sources = [
            {"path": str(tmp_path / place / "data"), "weight": 3},
            {"path": str(tmp_path / place / "small"), "weight": weight},
        ]
        return blended(tmp_path, "run", "serial", data__sources=sources, **changes)

    run(pool, config("one"), 2)
    ((heavier,),) = pool.run(train, 1, [(config("one", weight=2), None)])
    assert "data.sources is [" in heavier.error
    assert "--accept data.sources" in heavier.error
    (alone,) = pool.run(train, 1, [(config("two"), 4), (config("two"), None)])
    assert [outcome.code for outcome in alone] == [75, 0]


def test_a_single_dataset_that_moved_is_still_compared(pool: RankPool, tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", FIRST)
    write_tokens(tmp_path / "other", FIRST, seed=1)
    write_tokens(tmp_path / "copy", FIRST)
    run(pool, make_config(tmp_path, "run"), 2)
    moved = make_config(tmp_path, "run", data__path=str(tmp_path / "other"))
    ((outcome,),) = pool.run(train, 1, [(moved, None)])
    assert f"fingerprints of data, {tmp_path}/other" in outcome.error
    run(pool, make_config(tmp_path, "run", data__path=str(tmp_path / "copy")))


def test_a_large_file_written_to_since_is_told_though_its_blocks_agree() -> None:
    known = {"path": "d", "fingerprint": "f", "num_bytes": 1 << 40, "mtime_ns": 1}
    (told,) = changed_data({"data": known}, {"data": known | {"mtime_ns": 2}})
    assert told.needs == "free"
    assert "time of d.bin; written to or copied, the blocks compared agree" in told.text
    small = known | {"num_bytes": 1000}  # read whole: its time tells nothing more
    assert changed_data({"data": small}, {"data": small | {"mtime_ns": 2}}) == []
    assert changed_data({"data": known}, {"data": known, "eval/new": known}) == []
