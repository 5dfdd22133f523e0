"""Blends changed at a resume: each source goes on behind its samples, at any layout, on record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.checkpoint.find import open_checkpoint
from megalite.checkpoint.manifest import to_bytes
from megalite.checkpoint.names import MANIFEST
from megalite.config import RunConfig
from megalite.config.shares import decimal_fraction
from megalite.data.batches import Batches, source_seed
from megalite.data.blend import Blend
from megalite.data.sampler import SampleOrder
from megalite.train.blend_position import BlendPosition, resumed_position
from megalite.train.run_data import open_data
from tests.data.kit import PROPERTY
from tests.pool import RankPool
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    Outcome,
    lines,
    make_config,
    train,
    world_size,
    write_tokens,
)

SIZES = {"web": 30, "code": 11, "books": 7}  # samples; some epochs end within the runs
ORDERS = {"web": 0, "code": 1, "books": 2}  # as the sources come into the run
Shares = Mapping[str, float]  # weight by source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blends")
    for seed, (name, size) in enumerate(SIZES.items()):
        write_tokens(path / name, size, seed=seed)
    return path


def blended(
    folder: Path, name: str, shares: Shares, layout: str = "serial", **changes: Any
) -> RunConfig:
    """A run over the sources in this order; `new=old` renames one."""
    entries = [
        {"path": str(folder / source.split("=")[-1]), "name": source.split("=")[0], "weight": w}
        for source, w in shares.items()
    ]
    settings = {"data__path": None, "data__sources": entries, "train__steps": 14} | changes
    return make_config(folder, name, layout, optimizer__lr_schedule="constant", **settings)


def taken(shares: Shares, ids: list[int]) -> list[tuple[str, int]]:
    """Dataset and sample within it, of ids that count through the sources of a config."""
    owners = [
        (source.split("=")[-1], n) for source in shares for n in range(SIZES[source.split("=")[-1]])
    ]
    return [owners[number] for number in ids]


def train_on(
    pool: RankPool, config: RunConfig, shares: Shares, stop: int | None, accept: str = ""
) -> list[tuple[str, int]]:
    """Resume and train; the samples in the order of the run."""
    ranks: list[list[Outcome]] = pool.run(train, world_size(config), [(config, stop, accept)])
    assert all(outcome.code == (75 if stop else 0) for (outcome,) in ranks), ranks
    steps = sorted(ranks[0][0].sample_ids)
    ids = [sample for step in steps for (out,) in ranks for sample in out.sample_ids[step]]
    return taken(shares, ids)


def by_source(samples: list[tuple[str, int]]) -> dict[str, list[int]]:
    found = defaultdict(list)
    for source, sample in samples:
        found[source].append(sample)
    return found


CHANGES: tuple[tuple[Shares, str, int | None], ...] = (
    ({"web": 1, "code": 1}, "serial", 3),
    ({"web": 9, "code": 1}, "dp2", 5),  # other weights
    ({"books": 1, "web": 1, "code": 2}, "dp4", 7),  # one more, in another order
    ({"code": 1, "books": 1}, "dp2", 8),  # one less
    ({"texts=books": 3, "code": 1}, "serial", 10),  # a new name
    ({"code": 1, "web": 2, "texts=books": 1}, "dp2", None),  # one is back
)


def test_each_source_goes_on_behind_its_samples_through_every_change(
    pool: RankPool, folder: Path
) -> None:
    samples: list[tuple[str, int]] = []
    for number, (shares, layout, stop) in enumerate(CHANGES):
        config = blended(folder, "changed", shares, layout)
        accept = "data.sources" if number else ""
        samples += train_on(pool, config, shares, stop, accept)
    assert len(samples) == 14 * GLOBAL_BATCH
    for source, order in by_source(samples).items():
        whole = SampleOrder(SIZES[source], source_seed(config.train.seed, ORDERS[source]))
        assert order == whole.at(0, len(order)).tolist(), source

    # Each blend has its shares from the change on, and the record what was taken of each source.
    assert [source for source, _ in samples[:12]].count("web") == 6
    assert [source for source, _ in samples[12:20]].count("web") in (7, 8)
    kept = saved_blend(folder / "changed", 14)
    counts = {name: source["taken"] for name, source in kept["sources"].items()}
    wanted = {source: len(order) for source, order in by_source(samples).items()}
    assert counts == {"texts" if n == "books" else n: count for n, count in wanted.items()}
    assert kept["first_sample"] == 10 * GLOBAL_BATCH


def test_the_changed_order_is_on_record_and_needs_no_second_permission(
    pool: RankPool, folder: Path
) -> None:
    first, then = {"web": 1, "code": 1}, {"web": 9, "code": 1}
    orders: dict[str, list[tuple[str, int]]] = {}
    for name, layouts in (("straight", ("serial",)), ("moved", ("dp2", "dp4", "serial"))):
        train_on(pool, blended(folder, name, first), first, 3)
        accept, stops, orders[name] = "data.sources", [5, 9, None], []
        for layout, stop in zip(layouts, stops[-len(layouts) :], strict=True):
            config = blended(folder, name, then, layout)
            orders[name] += train_on(pool, config, then, stop, accept)
            accept = ""
    assert orders["straight"] == orders["moved"]
    log = (folder / "moved" / "log.txt").read_text()
    assert "6 taken before, this run takes 40 = 1.33 epochs" in log  # of web, at the change
    assert "23 taken before, this run takes " not in log


def saved_blend(run: Path, step: int) -> dict[str, Any]:
    manifest = open_checkpoint(run / "checkpoints" / f"step-{step:08d}").manifest
    state: Any = manifest.state
    kept: dict[str, Any] = state["trainer"]["blend"]
    return kept


def forget_the_blend(run: Path, step: int) -> None:
    """Make the checkpoint one of a version that kept no samples by source."""
    path = run / "checkpoints" / f"step-{step:08d}"
    manifest = open_checkpoint(path).manifest
    state: Any = manifest.state
    del state["trainer"]["blend"]
    (path / MANIFEST).write_bytes(to_bytes(manifest))


def test_a_checkpoint_without_the_record_goes_on_by_the_weights_it_was_saved_with(
    pool: RankPool, folder: Path
) -> None:
    first, then = {"web": 3, "code": 1}, {"web": 1, "code": 1}
    straight = train_on(pool, blended(folder, "whole", first), first, None)
    early = train_on(pool, blended(folder, "old", first), first, 4)
    forget_the_blend(folder / "old", 4)
    same = train_on(pool, blended(folder, "old", first), first, 6)
    assert early + same == straight[: 6 * GLOBAL_BATCH]  # bit for bit, with nothing to accept

    early = train_on(pool, blended(folder, "other", first), first, 4)
    forget_the_blend(folder / "other", 4)
    config = blended(folder, "other", then)
    samples = early + train_on(pool, config, then, None, "data.sources")
    for source, order in by_source(samples).items():
        whole = SampleOrder(SIZES[source], source_seed(config.train.seed, ORDERS[source]))
        assert order == whole.at(0, len(order)).tolist()


def test_a_checkpoint_of_an_order_that_is_gone_is_refused_and_then_goes_on_at_its_shares(
    pool: RankPool, folder: Path
) -> None:
    shares = {"web": 1.0, "code": 0.6180339887498949}
    config = blended(folder, "uneven", shares)
    train_on(pool, config, shares, 5)
    forget_the_blend(folder / "uneven", 5)
    ((outcome,),) = pool.run(train, 1, [(config, None)])
    assert "did not round weights to 1/65536: its order is not kept; each source goes on " in (
        outcome.error
    )
    assert "behind its share of the 20 samples taken, give or take one)" in outcome.error
    assert outcome.error.endswith("with --accept data.sources")

    train_on(pool, config, shares, 6, "data.sources")
    assert "accepted: data.sources is [" in (folder / "uneven" / "log.txt").read_text()
    kept = saved_blend(folder / "uneven", 6)
    before = {name: source["before"] for name, source in kept["sources"].items()}
    assert before == {"web": 12, "code": 8}  # of 20 samples: 12.36 and 7.64
    train_on(pool, config, shares, None)  # nothing to accept any more
    assert lines(folder / "uneven", "restart")[-1].get("changed", []) == []


# --- the record alone --------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
BLENDS = st.dictionaries(NAMES, st.integers(0, 9), min_size=1).filter(lambda b: any(b.values()))


@PROPERTY
@given(blends=st.lists(st.tuples(BLENDS, st.integers(0, 40)), min_size=1, max_size=6))
def test_any_changes_leave_out_nothing_and_repeat_nothing(
    blends: list[tuple[dict[str, int], int]],
) -> None:
    """Of each source the numbers 0, 1, 2 ... come in order, whatever blends follow one another."""
    saved: dict[str, Any] = {}
    old: RunConfig | None = None
    sample = 0
    shuffles: dict[str, int] = {}
    numbers: dict[str, list[int]] = defaultdict(list)
    for blend, count in blends:
        config = settings(blend)
        data = {name: {"fingerprint": name * 3} for name in blend}
        if old is None:
            position = BlendPosition.new({name: name * 3 for name in blend})
        else:
            position, has_order = resumed_position(saved, old, config, data, sample)
            assert has_order
        in_force = [position.sources[name] for name in blend]
        weights = [Fraction(weight) for weight in blend.values()]
        made = Blend(weights, position.first_sample, [source.before for source in in_force])
        places = made.at(sample, count)
        for source, number in zip(places.source.tolist(), places.number.tolist(), strict=True):
            name = list(blend)[source]
            numbers[name].append(number)
        for name, source in zip(blend, in_force, strict=True):
            assert shuffles.setdefault(name, source.shuffle) == source.shuffle
        sample += count
        saved, old = {"blend": position.state(made.counts(sample))}, config
    for found in numbers.values():
        assert found == list(range(len(found)))
    assert len(set(shuffles.values())) == len(shuffles)


def settings(blend: Mapping[str, float]) -> RunConfig:
    entries = [{"path": name, "weight": weight} for name, weight in blend.items()]
    return make_config(Path("runs"), "run", data__path=None, data__sources=entries)


def test_names_go_before_content_and_changed_content_keeps_its_place() -> None:
    old = settings({"a": 1, "b": 1})
    position = BlendPosition.new({"a": "x", "b": "y"})
    saved = {"blend": position.state([4, 4])}

    def begun(content: dict[str, str]) -> list[tuple[str, int, int]]:
        data = {name: {"fingerprint": known} for name, known in content.items()}
        new = settings(dict.fromkeys(content, 1.0))
        found, _ = resumed_position(saved, old, new, data, 8)
        return [(name, s.shuffle, s.before) for name, s in found.sources.items()]

    assert begun({"b": "y", "a": "x"}) == [("b", 1, 4), ("a", 0, 4)]
    assert begun({"c": "x", "b": "y"}) == [("c", 0, 4), ("b", 1, 4)]  # a, under a new name
    assert begun({"c": "new", "b": "y"}) == [("c", 2, 0), ("b", 1, 4), ("a", 0, 4)]
    assert begun({"c": "x", "d": "x", "b": "y"}) == [("c", 0, 4), ("d", 2, 0), ("b", 1, 4)]
    assert begun({"a": "z", "b": "y"}) == [
        ("a", 0, 0),
        ("b", 1, 0),
    ]  # the same blend, since sample 0
    assert begun({"a": "y", "c": "x"}) == [("a", 0, 4), ("c", 2, 0), ("b", 1, 4)]


def test_a_blend_that_begins_later_is_the_same_however_it_is_asked_for() -> None:
    weights = [decimal_fraction(weight) for weight in (0.5, 0.3, 0.2)]
    late, from_start = Blend(weights, 1000, [7, 8, 9]), Blend(weights)
    source, number = late.at(1040, 25)
    plain = from_start.at(40, 25)
    assert source.tolist() == plain.source.tolist()
    assert (number - plain.number).tolist() == [[7, 8, 9][which] for which in source]
    assert late.counts(1000) == [7, 8, 9]
    assert late.counts(1010) == [12, 11, 11]


def test_batches_begin_again_at_a_sample(folder: Path) -> None:
    config = blended(folder, "x", {"web": 1, "code": 1})
    batches: Batches = open_data(config).train
    batches.begin_at(100, [1, 0], [5, 6])
    ids = batches.sample_ids(100, 4).tolist()
    web = SampleOrder(30, source_seed(config.train.seed, 1)).at(5, 2)
    code = SampleOrder(11, source_seed(config.train.seed, 0)).at(6, 2) + 30
    assert sorted(ids) == sorted([*web.tolist(), *code.tolist()])


def test_weights_by_size_begin_anew_where_a_size_has_changed(folder: Path) -> None:
    def position(old: RunConfig, new: RunConfig, web: str) -> BlendPosition:
        found = {name: {"fingerprint": name} for name in ("web", "code")}
        before = {
            name: {"shuffle": number, "fingerprint": name, "before": 0, "taken": 5}
            for number, name in enumerate(found)
        }
        saved = {"data": found, "blend": {"first_sample": 0, "sources": before}}
        now = {**found, "web": {"fingerprint": web}}
        return resumed_position(saved, old, new, now, 10)[0]

    given = blended(folder, "given", {"web": 1, "code": 1})
    by_size = blended(folder, "size", {"web": 1, "code": 1}, data__weights="size")
    assert position(by_size, by_size, "web").first_sample == 0
    assert position(given, given, "other").first_sample == 0
    assert position(by_size, by_size, "other").first_sample == 10
    assert position(given, by_size, "web").first_sample == 10
