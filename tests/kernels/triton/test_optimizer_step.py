"""The distributed optimizer on Triton's update: beside the reference, over shards, its policies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.config import OptimizerConfig
from megalite.distributed.mesh import Mesh
from megalite.kernels import Kernels
from megalite.kernels.triton import adamw_plan as triton_adamw_plan
from megalite.kernels.triton.operations import TRITON
from megalite.layout.topology import Topology
from megalite.optim.distributed_optimizer import DistributedOptimizer
from tests.kernels.triton.kit import shim
from tests.optim.kit.synthetic import (
    SyntheticChunk,
    accumulate,
    differing_replicas,
    make,
    make_chunks,
    train,
)
from tests.pool import RankContext, RankPool
from tests.tolerances import BFLOAT16_UNIT, KERNEL_FORWARD

FLOAT32 = KERNEL_FORWARD[torch.float32]
Pair = tuple[list[SyntheticChunk], DistributedOptimizer]


@pytest.fixture(name="mesh")
def one_rank_mesh() -> Mesh:
    return Mesh(Topology())


def both(mesh: Mesh, dtype: torch.dtype, **settings: Any) -> tuple[Pair, Pair]:
    """(reference, Triton) optimizers of the same chunks, in few buckets."""
    settings = {"bucket_mb": 0.002, **settings}
    found = [make(mesh, dtype, ops=ops, **settings) for ops in (Kernels(), TRITON)]
    return found[0], found[1]


def far(got: DistributedOptimizer, want: DistributedOptimizer, kinds: str = "") -> float:
    """Largest difference of a state, relative to its largest value."""
    pairs = zip(got.named_state(), want.named_state(), strict=True)
    return max(
        float((a.tensor.double() - b.tensor.double()).abs().max() / b.tensor.abs().max())
        for a, b in pairs
        if a.name.startswith(kinds)
    )


def unrounded(chunks: list[SyntheticChunk], optimizer: DistributedOptimizer) -> list[str]:
    """Parameters that are not the rounded master, bit for bit."""
    masters = {s.name: s.tensor for s in optimizer.named_state()}
    return [
        spec.name
        for chunk in chunks
        for param, spec in chunk.named_params()
        if not torch.equal(
            param.detach().view(-1), masters[f"param/{spec.name}"].to(param.dtype).view(-1)
        )
    ]


SETTINGS: list[dict[str, Any]] = [
    {"clip_grad": 0.1, "groups": [{"match": "layers.2.*", "lr_scale": 0.5}], "ema_decay": 0.5},
    {"clip_grad": None, "name": "muon", "weight_decay": 0.3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["groups", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_three_steps_equal_the_reference(
    mesh: Mesh, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    """Clipping, loss scale, rate groups, Muon beside it, an average: the same numbers."""
    reference, triton = both(mesh, dtype, loss_scale=8.0, **settings)
    want, got = train(*reference, mesh, 3), train(*triton, mesh, 3)
    assert [r.grad_norm for r in got] == pytest.approx([r.grad_norm for r in want], rel=1e-12)
    assert far(triton[1], reference[1]) <= FLOAT32
    assert unrounded(*triton) == []
    pairs = zip(triton[1].named_grads(), reference[1].named_grads(), strict=True)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in pairs)
    again = zip(triton[1].named_grads(), reference[1].named_grads(), strict=True)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in again)  # multiplied once


def test_bfloat16_moments_equal_the_reference_up_to_their_rounding(mesh: Mesh) -> None:
    reference, triton = both(mesh, torch.bfloat16, moment_dtype="bfloat16")
    train(*reference, mesh, 3, lr=1e-3)
    train(*triton, mesh, 3, lr=1e-3)
    assert all(
        s.tensor.dtype == torch.bfloat16
        for s in triton[1].named_state()
        if s.name.startswith("exp_avg")
    )
    assert far(triton[1], reference[1], "exp_avg") <= 2 * BFLOAT16_UNIT
    assert far(triton[1], reference[1], "param") <= 1e-5  # a rate of 1e-3 times moments' rounding
    assert unrounded(*triton) == []


def test_a_held_step_changes_nothing(mesh: Mesh) -> None:
    _, (chunks, optimizer) = both(mesh, torch.bfloat16, clip_grad=0.1)
    before = [s.tensor.clone() for s in optimizer.named_state()]
    accumulate(chunks, optimizer, mesh, 0)
    held = optimizer.step(0.1, skip_update=True)
    assert (held.skipped, held.num_updates) == (True, 0)
    after = [s.tensor for s in optimizer.named_state()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    norm = torch.cat([g.tensor for g in optimizer.named_grads()]).double().norm()
    assert float(norm) == pytest.approx(held.grad_norm, rel=1e-6)  # not clipped


def test_frozen_parameters_stay(mesh: Mesh) -> None:
    chunks = make_chunks(mesh, torch.bfloat16)
    frozen = [p for p, spec in chunks[0].named_params() if "layers.1" in spec.name]
    for param in frozen:
        param.requires_grad_(False)
    config, cpu = OptimizerConfig(weight_decay=0.5), torch.device("cpu")
    optimizer = DistributedOptimizer(chunks, mesh, config, torch.bfloat16, cpu, TRITON)
    kept = [p.detach().clone() for p in frozen]
    train(chunks, optimizer, mesh, 2)
    assert all(torch.equal(a, b) for a, b in zip(kept, frozen, strict=True))
    assert unrounded(chunks, optimizer) == []


# a NaN; finite, but its square is not; a clip coefficient that float32 has not
BAD: list[tuple[float, int, float | None]] = [
    (float("nan"), 1, 1.0),
    (1e25, 0, None),
    (3e38, 0, 0.1),
]


@pytest.mark.parametrize(("value", "bad_ranks", "clip"), BAD)
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_step_that_is_not_finite_or_too_large_is_skipped(
    mesh: Mesh, moments: str, value: float, bad_ranks: int, clip: float | None
) -> None:
    settings = {"non_finite": "skip", "clip_grad": clip, "moment_dtype": moments}
    _, (chunks, optimizer) = both(mesh, torch.bfloat16, **settings)
    train(chunks, optimizer, mesh, 1)
    live = [s.tensor for s in optimizer.named_state()]
    live += [param.detach() for param, _ in chunks[0].named_params()]
    before = [x.clone() for x in live]
    accumulate(chunks, optimizer, mesh, 1, {"layers.1.bias": value})
    result = optimizer.step(0.01)
    assert (result.skipped, result.num_bad_ranks, result.num_updates) == (True, bad_ranks, 1)
    assert all(map(torch.equal, before, live))
    assert not train(chunks, optimizer, mesh, 1, first_step=2)[0].skipped


class Touched(TorchDispatchMode):
    """Collects the operations of torch that read or write some storages."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._storages = {x.untyped_storage().data_ptr() for x in tensors}
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not func.is_view and any(
            x.untyped_storage().data_ptr() in self._storages for x in tensors
        ):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_update_is_one_pass(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one launch a run, nothing reads or writes gradients, masters or parameters."""
    _, (chunks, optimizer) = both(mesh, torch.bfloat16, clip_grad=0.1)
    train(chunks, optimizer, mesh, 1)
    optimizer.wait_params()
    launched: list[Tensor] = []
    monkeypatch.setattr(triton_adamw_plan, "adamw_", lambda w, *_, **__: launched.append(w))
    large = [
        x for shard in optimizer._bucket_shards for x in (shard.grad, shard.weight, shard.param)
    ]
    with Touched(large) as touched:
        optimizer._update(0.01, 0.5)
    assert touched.names == []
    assert len(launched) == len(optimizer._runs)
    assert sum(len(x) for x in launched) == sum(len(s.weight) for s in optimizer._bucket_shards)


def shards_and_whole(ctx: RankContext, settings: dict[str, Any]) -> dict[str, Any]:
    """Three steps with shards and without, by Triton, and with shards by the reference."""
    shim.install()
    mesh = ctx.mesh(tp=1)
    runs = []
    for zero, ops in ((1, TRITON), (0, TRITON), (1, Kernels())):
        chunks, optimizer = make(mesh, torch.bfloat16, ops=ops, zero=zero, **settings)
        norms = [r.grad_norm for r in train(chunks, optimizer, mesh, 3)]
        optimizer.wait_params()
        params = [p.detach().clone() for p, _ in chunks[0].named_params()]
        runs.append((optimizer, params, norms, differing_replicas(chunks, mesh)))
    (sharded, params, norms, differing), (whole, others, *_), (reference, _, want, _) = runs
    parts = {s.name: s.tensor for s in whole.named_state()}
    return {
        "params": all(map(torch.equal, params, others)),
        "states": all(
            torch.equal(s.tensor, parts[s.name][s.start : s.stop]) for s in sharded.named_state()
        ),
        "reference": far(sharded, reference),
        "norms": max(abs(a / b - 1) for a, b in zip(norms, want, strict=True)),
        "differing": differing,
    }


def test_shards_are_bits_of_the_whole_on_two_ranks(pool: RankPool) -> None:
    """Clipped by a norm that is summed over other ranges: still the same bits."""
    settings = {"clip_grad": 0.1, "bucket_mb": 0.002}
    for found in pool.run(shards_and_whole, 2, settings):
        assert found["params"]
        assert found["states"]
        assert found["reference"] <= FLOAT32
        assert found["norms"] <= 1e-12
        assert found["differing"] == []
