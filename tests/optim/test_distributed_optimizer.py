"""The optimizer on ranks: every layout against one process, and what must be the same bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from tests.optim.kit.synthetic import (
    TIED,
    Expected,
    differing_replicas,
    expected,
    make,
    train,
    worst_error,
)
from tests.pool import RankContext, RankPool

# ranks, {axis: size} with dp the rest, chunks per pipeline rank, clip: 0.1 always, 1e9 never
LAYOUTS = [
    (8, {"tp": 2, "pp": 2}, 2, 0.1),
    (8, {"tp": 2, "pp": 2}, 1, 1e9),
    (8, {"cp": 2, "tp": 2}, 1, 0.1),
    (4, {"pp": 4}, 1, 0.1),
    (4, {}, 1, 0.1),
    (3, {}, 1, 0.1),
    (2, {"tp": 2}, 1, 1e9),
]
VARIANTS: list[dict[str, Any]] = [
    {"zero": zero, "overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    for zero in (0, 1)
    for overlap in (False, True)
]


@cache
def one_process(num_steps: int, clip_grad: float | None) -> Expected:
    return expected(num_steps, OptimizerConfig(clip_grad=clip_grad))


def weights(chunks: list[Any]) -> list[Tensor]:
    return [param.detach().clone() for chunk in chunks for param, _ in chunk.named_params()]


def compare_variants(
    ctx: RankContext, axes: dict[str, int], vpp: int, clip_grad: float, want: Expected
) -> list[dict[str, Any]]:
    """Three steps with each variant: error, norms as hex, differing replicas, same bits or not."""
    mesh = ctx.mesh(**axes)
    found = []
    previous: list[Tensor] = []
    for variant in VARIANTS:
        chunks, optimizer = make(mesh, vpp=vpp, clip_grad=clip_grad, **variant)
        results = train(chunks, optimizer, mesh, len(want.norms))
        error = worst_error(chunks, optimizer, mesh, want)
        now = weights(chunks)
        overlap = variant["overlap_grad_reduce"]
        found.append(
            {
                "error": error,
                "norms": [r.grad_norm.hex() for r in results],
                "coefficients": [r.clip_coefficient.hex() for r in results],
                "differing": differing_replicas(chunks, mesh),
                "same_bits": not overlap or all(map(torch.equal, now, previous)),
            }
        )
        previous = now
    return found


@pytest.mark.parametrize(("num_ranks", "axes", "vpp", "clip_grad"), LAYOUTS)
def test_every_layout_equals_one_process(
    pool: RankPool, num_ranks: int, axes: dict[str, int], vpp: int, clip_grad: float
) -> None:
    """A01 (partial gradients), A06 (one norm over stages and chunks); always and never clipping."""
    want = one_process(3, clip_grad)
    ranks = pool.run(compare_variants, num_ranks, axes, vpp, clip_grad, want)
    for variant in range(len(VARIANTS)):
        found = [rank[variant] for rank in ranks]
        assert max(f["error"] for f in found) < 1e-12
        assert [f["differing"] for f in found] == [[]] * num_ranks
        assert all(f["same_bits"] for f in found)
        assert len({tuple(f["norms"]) for f in found}) == 1
        assert len({tuple(f["coefficients"]) for f in found}) == 1
        norms = [float.fromhex(norm) for norm in found[0]["norms"]]
        assert norms == pytest.approx(want.norms, rel=1e-12)


def train_without(ctx: RankContext, part: str, want: Expected) -> tuple[float, list[str]]:
    """Three steps with one part of the step taken out."""
    mesh = ctx.mesh(tp=2, pp=2)
    chunks, optimizer = make(mesh)
    setattr(optimizer, part, lambda: None)
    train(chunks, optimizer, mesh, 3)
    error = worst_error(chunks, optimizer, mesh, want)
    return error, differing_replicas(chunks, mesh)


def test_tied_copies_drift_when_their_sum_is_taken_out(pool: RankPool) -> None:
    """A09: the check for equal copies fails without the sum over the embedding axis."""
    ranks = pool.run(train_without, 4, "_sum_tied", one_process(3, 1.0))
    assert all(differing == [TIED.name] for _, differing in ranks)


def test_norms_differ_when_the_sum_over_tp_is_taken_out(pool: RankPool) -> None:
    """A01: the parity check fails without the sum of partial gradients."""
    ranks = pool.run(train_without, 4, "_sum_partial", one_process(3, 1.0))
    assert min(error for error, _ in ranks) > 1e-3
    assert all(any("norm" in name for name in differing) for _, differing in ranks)


def train_low_precision(ctx: RankContext, zero: int) -> dict[str, Any]:
    """Three bf16 steps: whether weights are the rounded masters, and replicas the same bits."""
    mesh = ctx.mesh(tp=2)
    chunks, optimizer = make(mesh, torch.bfloat16, zero=zero)
    train(chunks, optimizer, mesh, 3)
    optimizer.wait_params()
    params = {spec.name: param for param, spec in chunks[0].named_params()}
    rounded = [
        torch.equal(params[s.spec.name].detach().view(-1)[s.start : s.stop], s.tensor.bfloat16())
        for s in optimizer.named_state()
        if s.name.startswith("param/")
    ]
    differing = differing_replicas(chunks, mesh)
    return {"rounded": rounded, "differing": differing, "weights": weights(chunks)}


@pytest.mark.long
def test_bfloat16_weights_are_rounded_masters_on_every_rank(pool: RankPool) -> None:
    sharded = pool.run(train_low_precision, 8, 1)
    whole = pool.run(train_low_precision, 8, 0)
    for a, b in zip(sharded, whole, strict=True):
        assert all(a["rounded"])
        assert all(b["rounded"])
        assert a["differing"] == b["differing"] == []
        for x, y in zip(a["weights"], b["weights"], strict=True):
            # gradient sums differ in fp32 order only: at most one bf16 rounding (2^-8) apart
            torch.testing.assert_close(x, y, rtol=2**-7, atol=1e-6)
