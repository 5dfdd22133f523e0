"""Norms by group and parameter statistics: right, each parameter once, the same at every layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megalite.config import ModelConfig, RunConfig
from megalite.record.param_stats import ParamStats
from megalite.run.parameters import stage_parameters, whole_model
from tests.pool import RankPool
from tests.tolerances import PARITY_FLOAT64
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    checkpoint_tensors,
    lines,
    make_config,
    make_trainer,
    train,
    world_size,
    write_tokens,
)

SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": 97,
}
GROUPS = {"embedding", "layers.0", "layers.1", "layers.2", "layers.3", "norms", "head"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stats")
    write_tokens(path / "data", 4 * GLOBAL_BATCH)
    return path


def stats_config(folder: Path, name: str, layout: str, **changes: Any) -> RunConfig:
    options = {"train__dtype": "float64", "train__steps": 4, "log__param_stats_interval": 2}
    return make_config(folder, name, layout, **{**options, "checkpoint__interval": 1, **changes})


@pytest.fixture(scope="module")
def serial(folder: Path, pool: RankPool) -> Path:
    config = stats_config(folder, "serial", "serial")
    pool.run(train, 1, [(config, None)])
    return folder / "serial"


def flat(line: dict[str, Any]) -> dict[str, float]:
    stats = {
        f"{name}/{key}": value
        for name, values in line["param_stats"].items()
        for key, value in values.items()
    }
    return {**line["grad_norms"], **stats}


def test_they_are_there_at_their_interval_only(serial: Path) -> None:
    with_stats = [line["step"] for line in lines(serial, "step") if "param_stats" in line]
    assert with_stats == [2, 4]
    assert not any("grad_norms" in line for line in lines(serial, "step")[::2])


def test_they_are_what_the_checkpoints_say(serial: Path) -> None:
    line = lines(serial, "step")[3]
    before, after = (checkpoint_tensors(serial, step) for step in (3, 4))
    names = [name.removeprefix("param/") for name in after if name.startswith("param/")]
    assert set(line["param_stats"]) == set(names)
    for name in names:
        new, old = after[f"param/{name}"].double(), before[f"param/{name}"].double()
        found = line["param_stats"][name]
        assert found["mean"] == pytest.approx(float(new.mean()), rel=1e-9, abs=1e-15)
        assert found["rms"] == pytest.approx(float(new.square().mean().sqrt()), rel=1e-9)
        assert found["max_abs"] == float(new.abs().max())
        change = float((new - old).norm() / old.norm())
        assert found["update_to_weight"] == pytest.approx(change, rel=1e-9)


def test_the_groups_share_the_norm_before_clipping(serial: Path) -> None:
    for line in (lines(serial, "step")[i] for i in (1, 3)):
        assert set(line["grad_norms"]) == GROUPS
        assert line["grad_norm"] == pytest.approx(
            math.hypot(*line["grad_norms"].values()), rel=1e-9
        )
        squares = dict.fromkeys(GROUPS, 0.0)
        model = make_config(serial, "groups").model
        groups = {spec.name: spec.group for spec in stage_parameters(model, whole_model(model))}
        for name, values in line["param_stats"].items():
            squares[groups[name]] += values["grad_norm"] ** 2
        for group, value in line["grad_norms"].items():
            assert value == pytest.approx(math.sqrt(squares[group]), rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "changes"),
    [("zero1", {}), ("tp2", {"parallel__sequence_parallel": True}), ("3d", {})],
)
def test_every_layout_gives_the_same_numbers(
    pool: RankPool, folder: Path, serial: Path, layout: str, changes: dict[str, Any]
) -> None:
    config = stats_config(folder, layout, layout, **changes)
    pool.run(train, world_size(config), [(config, None)])
    for index in (1, 3):
        wanted, found = (flat(lines(run, "step")[index]) for run in (serial, folder / layout))
        assert found == pytest.approx(wanted, rel=PARITY_FLOAT64, abs=1e-15)


def test_a_tied_embedding_counts_once(pool: RankPool, folder: Path) -> None:
    found = []
    for layout in ("serial", "pp2"):
        config = stats_config(folder, f"tied-{layout}", layout, model__tie_embeddings=True)
        pool.run(train, world_size(config), [(config, None)])
        found.append(lines(folder / f"tied-{layout}", "step")[1])
    one, two = found
    assert set(one["grad_norms"]) == GROUPS - {"head"}
    assert flat(two) == pytest.approx(flat(one), rel=PARITY_FLOAT64, abs=1e-15)


def counted_calls(ctx: Any, config: RunConfig) -> list[int]:
    """Runs in a rank: how often a run measures."""
    calls = [0, 0]
    before, after = ParamStats.before, ParamStats.after

    def count_before(self: ParamStats) -> Any:
        calls[0] += 1
        return before(self)

    def count_after(self: ParamStats, *arguments: Any, **named: Any) -> Any:
        calls[1] += 1
        return after(self, *arguments, **named)

    ParamStats.before, ParamStats.after = count_before, count_after
    try:
        train(ctx, [(config, None)])
    finally:
        ParamStats.before, ParamStats.after = before, after
    return calls


def test_off_costs_nothing(pool: RankPool, folder: Path) -> None:
    off = stats_config(folder, "off", "serial", log__param_stats_interval=0)
    on = stats_config(folder, "on", "serial", log__param_stats_interval=4)
    assert pool.run(counted_calls, 1, off) == [[0, 0]]
    assert pool.run(counted_calls, 1, on) == [[1, 1]]


def held(ctx: Any, config: RunConfig) -> tuple[float, float]:
    """Norms of a step that a spike holds back, by the optimizer and by the groups."""
    trainer = make_trainer(ctx, config)
    optimizer = trainer.engine.optimizer
    optimizer.begin_step()
    for buffers in optimizer._buffers:
        buffers.grads.fill_(3.0 * optimizer.loss_scale)
    before = trainer.stats.before()
    result = optimizer.step(1e-3, skip_update=True)
    norms = trainer.stats.after(before, result)["grad_norms"].values()
    return result.grad_norm, math.hypot(*norms)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_step_held_back_has_the_norms_of_its_gradients_too(
    pool: RankPool, folder: Path, dtype: str
) -> None:
    """Its gradients are neither clipped nor divided by the loss scale."""
    config = stats_config(folder, f"held-{dtype}", "serial", train__dtype=dtype)
    ((whole, groups),) = pool.run(held, 1, config)
    assert groups == pytest.approx(whole, rel=1e-6)


def test_groups() -> None:
    """Norms are one group, positions count as embedding, biases belong to their layer."""
    model = ModelConfig(**SMALL, family="gpt2", qk_norm=True, tie_embeddings=False)
    groups = {spec.name: spec.group for spec in stage_parameters(model, whole_model(model))}
    assert groups["embedding.weight"] == groups["position.weight"] == "embedding"
    assert groups["layers.3.attention.qkv.weight"] == groups["layers.3.mlp.up.bias"] == "layers.3"
    assert groups["layers.3.attention.q_norm.weight"] == groups["layers.3.mlp_norm.bias"] == "norms"
    assert (groups["final_norm.weight"], groups["head.weight"]) == ("norms", "head")
    assert set(groups.values()) == GROUPS
