"""State as checkpoints see it: who owns what, and loading it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optim.kit.synthetic import (
    differing_replicas,
    draw,
    local_part,
    make,
    stage_sections,
    train,
)
from tests.pool import RankContext, RankPool


def list_state(ctx: RankContext, zero: int, dtype: torch.dtype) -> list[Any]:
    """(name, tp block, start, stop, owner) of every state tensor of this rank."""
    mesh = ctx.mesh(tp=2, pp=2)
    _, optimizer = make(mesh, dtype, zero=zero)
    return [
        (s.name, mesh.tp.rank if s.spec.cut_dim is not None else 0, s.start, s.stop, s.owner)
        for s in optimizer.named_state()
        if s.tensor.numel() == s.stop - s.start and s.tensor.dim() == 1
    ]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_owners_cover_every_number_exactly_once(
    pool: RankPool, zero: int, dtype: torch.dtype
) -> None:
    ranks = pool.run(list_state, 8, zero, dtype)
    ranges: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for name, block, start, stop, owner in (item for rank in ranks for item in rank):
        if owner:
            ranges.setdefault((name, block), []).append((start, stop))
    specs = [spec for section in stage_sections(0, 1) for spec in section]
    assert set(ranges) == {
        (f"{kind}/{spec.name}", block)
        for spec in specs
        for kind in ("param", "exp_avg", "exp_avg_sq")
        for block in ((0, 1) if spec.cut_dim is not None else (0,))
    }
    numels = {spec.name: torch.Size(spec.local_shape(2)).numel() for spec in specs}
    for (name, _), parts in ranges.items():
        ends = [0]
        for start, stop in sorted(parts):
            assert start == ends[-1] < stop
            ends.append(stop)
        assert ends[-1] == numels[name.split("/")[1]]


def save_and_load(
    ctx: RankContext, zero: int, dtype: torch.dtype, settings: dict[str, Any]
) -> tuple[bool, bool, list[str]]:
    """Whether two steps, a load into a fresh optimizer and two steps equal four steps, bitwise.

    And whether parameters are those of the second step before the third one begins.
    """
    mesh = ctx.mesh(tp=2, pp=2)
    chunks, optimizer = make(mesh, dtype, zero=zero, **settings)
    train(chunks, optimizer, mesh, 2)
    optimizer.wait_params()
    before = [param.clone() for chunk in chunks for param, _ in chunk.named_params()]
    saved = {s.name + str(s.start): s.tensor.clone() for s in optimizer.named_state()}
    scalars = optimizer.scalars()
    train(chunks, optimizer, mesh, 2, first_step=2)
    optimizer.wait_params()

    fresh, loaded = make(mesh, dtype, zero=zero, **settings)
    for chunk in fresh:
        for param, _ in chunk.named_params():
            param.data.fill_(7.0)
    for state in loaded.named_state():
        state.tensor.copy_(saved[state.name + str(state.start)])
    loaded.load_scalars(scalars)
    loaded.after_load()
    after = [param for chunk in fresh for param, _ in chunk.named_params()]
    params = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    train(fresh, loaded, mesh, 2, first_step=2)
    loaded.wait_params()
    pairs = zip(chunks, fresh, strict=True)
    params += [
        torch.equal(a, b)
        for x, y in pairs
        for (a, _), (b, _) in zip(x.named_params(), y.named_params(), strict=True)
    ]
    states = zip(optimizer.named_state(), loaded.named_state(), strict=True)
    same = [torch.equal(a.tensor, b.tensor) for a, b in states]
    return all(params), all(same), differing_replicas(fresh, mesh)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_loading_equals_never_stopping(pool: RankPool, zero: int, dtype: torch.dtype) -> None:
    ranks = pool.run(save_and_load, 8, zero, dtype, {})
    assert ranks == [(True, True, [])] * 8


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16 moments": {"moment_dtype": "bfloat16"},
    "bf16 reduction": {"grad_reduce_dtype": "bfloat16"},
    "average": {"ema_decay": 0.9},
    "groups": {"groups": [{"match": "layers.1.*", "lr_scale": 0.5, "weight_decay": 0.3}]},
    "muon": {"name": "muon"},
    "muon with bf16 moments and average": {
        "name": "muon",
        "moment_dtype": "bfloat16",
        "ema_decay": 0.9,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS)
def test_loading_equals_never_stopping_with_each_option(pool: RankPool, option: str) -> None:
    ranks = pool.run(save_and_load, 8, 1, torch.bfloat16, OPTIONS[option])
    assert ranks == [(True, True, [])] * 8


def test_loading_a_scaled_run_equals_never_stopping(pool: RankPool) -> None:
    """float16: the scale and its counters come back, too."""
    settings = {"loss_scale": 4.0, "loss_scale_interval": 3}
    ranks = pool.run(save_and_load, 8, 1, torch.float16, settings)
    assert ranks == [(True, True, [])] * 8


def step_after_weights_only(ctx: RankContext, zero: int) -> list[float]:
    """Largest distance of bf16 parameters from loaded weights, before and after a tiny step."""
    mesh = ctx.mesh()
    chunks, optimizer = make(mesh, torch.bfloat16, zero=zero)
    loaded = {
        spec.name: local_part(draw("other", spec.name)(spec.shape), spec, mesh).bfloat16()
        for _, spec in chunks[0].named_params()
    }
    for state in optimizer.named_state():
        if state.kind == "param":
            state.tensor.copy_(loaded[state.spec.name].reshape(-1)[state.start : state.stop])
    optimizer.after_weights_load()

    def distance() -> float:
        optimizer.wait_params()
        pairs = [(p.detach(), loaded[spec.name]) for p, spec in chunks[0].named_params()]
        return max(float((param - weight).abs().max()) for param, weight in pairs)

    before = distance()
    train(chunks, optimizer, mesh, 1, lr=1e-6)
    return [before, distance()]


@pytest.mark.parametrize("zero", [0, 1])
def test_weights_only_load_survives_the_first_step(pool: RankPool, zero: int) -> None:
    """B10: masters and parameters follow loaded weights, which no step throws away."""
    for before, after in pool.run(step_after_weights_only, 2, zero):
        assert before == 0
        assert after <= 2e-6
