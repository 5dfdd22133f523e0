"""Muon: the formula on whole matrices, at every layout, and where its state lies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalite.distributed.mesh import Mesh
from megalite.layout.bucket_plan import ALIGN, BucketItem, plan_chunk, plan_whole
from megalite.layout.topology import Topology
from megalite.optim.muon import orthogonalise, update_scale
from tests.optim.kit.model_runs import Changes, engine_of, outcome, serial
from tests.parity.case import STEPS, Case, rank_batches
from tests.parity.run import compare
from tests.pool import RankPool
from tests.tolerances import PARITY_FLOAT64, PLAIN_FLOAT64

MUON: Changes = (("optimizer.name", "muon"),)
HIDDEN = ("attention.qkv.weight", "attention.out.weight", "mlp.gate_up.weight", "mlp.down.weight")


# --- the arithmetic ------------------------------------------------------------------------------


def plain_orthogonalise(g: Tensor, steps: int) -> Tensor:
    """By its action on singular values: the polynomial of each, singular vectors kept."""
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 7)])
def test_newton_schulz_acts_on_singular_values_only(shape: tuple[int, int]) -> None:
    g = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 1e-9
    for steps in (1, 5):
        got, want = orthogonalise(g, steps, torch.float64), plain_orthogonalise(g, steps)
        assert float((got - want).abs().max()) < 1e-11
    values = torch.linalg.svdvals(orthogonalise(g, 5, torch.float64))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.25


def test_newton_schulz_of_zero_is_zero_and_of_bf16_is_near() -> None:
    assert torch.equal(orthogonalise(torch.zeros(3, 4), 5, torch.float32), torch.zeros(3, 4))
    g = torch.randn(24, 40, generator=torch.Generator().manual_seed(4))
    wide = orthogonalise(g, 5, torch.float32)
    narrow = orthogonalise(g, 5, torch.bfloat16)
    assert narrow.dtype == torch.float32
    # each step rounds to 8 bits, and the polynomial's slope is at most 3.4
    assert 1e-4 < float((narrow - wide).abs().max()) < 5 * 2**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [-115, -60, 60, 115])
def test_newton_schulz_of_entries_whose_squares_have_no_float(
    power: int, dtype: torch.dtype
) -> None:
    """A norm by squares would be 0 or inf: the direction would be NaN, or nothing."""
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(3), dtype=dtype)
    want = orthogonalise(matrix, 5, dtype)
    assert torch.equal(orthogonalise(matrix * 2.0**power, 5, dtype), want)
    assert want.isfinite().all()


def test_update_scales() -> None:
    assert update_scale(64, 256, "adamw_rms") == pytest.approx(0.2 * 16)
    assert update_scale(256, 64, "spectral") == 2.0
    assert update_scale(64, 256, "spectral") == 1.0
    # an orthogonal matrix [r, c] times 0.2 * sqrt(max(r, c)) has elements of RMS 0.2
    q = torch.linalg.qr(torch.randn(64, 16, dtype=torch.float64)).Q
    assert float((q * update_scale(64, 16, "adamw_rms")).square().mean().sqrt()) == pytest.approx(
        0.2
    )


# --- where matrices lie --------------------------------------------------------------------------


@given(
    numels=st.lists(st.integers(1, 400), max_size=24),
    capacity=st.integers(1, 900),
    num_owners=st.integers(1, 6),
)
def test_shards_are_made_of_whole_parameters(
    numels: list[int], capacity: int, num_owners: int
) -> None:
    end = 0
    seen: list[int] = []
    for plan in plan_whole(numels, capacity, num_owners, ALIGN):
        shard, rest = divmod(plan.stop - plan.start, num_owners)
        assert plan.start == end
        assert (rest, shard % ALIGN) == (0, 0)
        used = plan.start
        for item, start in zip(plan.items, plan.starts, strict=True):
            assert start >= used
            used = start + numels[item]
            assert (start - plan.start) // shard == (used - 1 - plan.start) // shard
        assert used <= plan.stop
        # longest first to the least loaded: at most 4/3 of the best, which is at least the mean
        sizes = [-(-numels[i] // ALIGN) * ALIGN for i in plan.items]
        assert shard <= 4 / 3 * max(sum(sizes) / num_owners, max(sizes)) + ALIGN
        seen += plan.items
        end = plan.stop
    assert sorted(seen) == list(range(len(numels)))


def test_buckets_come_in_the_order_in_which_they_fill() -> None:
    whole = [False, True, True, False, True, True, False]
    plans = plan_chunk([BucketItem(50, "dense", 2, 2, whole=flag) for flag in whole], 90)
    assert [max(plan.items) for plan in plans] == sorted(max(plan.items) for plan in plans)
    assert all({whole[i] for i in plan.items} == {plan.whole} for plan in plans)
    assert [plan.start for plan in plans] == [0, *(plan.stop for plan in plans[:-1])]


def test_layers_of_one_shape_are_spread_without_waste() -> None:
    """A stack of 32 Llama layers over 8 owners: bytes and cost within a few percent."""
    hidden, ffn = 512, 1408
    layer = [hidden * 768, hidden * hidden, 2 * ffn * hidden, ffn * hidden]
    (*_, last) = plans = plan_whole(layer * 32, 10 << 20, 8, ALIGN)
    assert last.stop <= 1.06 * sum(layer) * 32
    assert len(plans) > 1  # still several, so that reductions overlap with backward


# --- the model -----------------------------------------------------------------------------------


def split(name: str, whole: Tensor, kv_heads: int) -> list[Tensor]:
    """A weight's matrices as views, written out for each kind of weight."""
    if name.endswith("qkv.weight"):
        groups = whole.view(kv_heads, -1, 8, whole.shape[-1])
        return [groups[:, :-2], groups[:, -2], groups[:, -1]]
    return [whole[0], whole[1]] if name.endswith("gate_up.weight") else [whole]


def plain_muon(case: Case, changes: dict[str, Any]) -> dict[str, Tensor]:
    """Whole float64 weights by name, updated by the formula from this process's gradients.

    AdamW's part is torch's own, with the same gradients.
    """
    decay, lr, mu = 0.1, 1e-2, changes.get("optimizer.muon_momentum", 0.95)
    engine = engine_of(Mesh(Topology()), case, 5, tuple(changes.items()))
    named = {spec.name: p for chunk in engine.chunks for p, spec in chunk.named_params()}
    whole = {name: p.detach().clone() for name, p in named.items()}
    momenta = {name: torch.zeros_like(p) for name, p in whole.items()}
    rest = [n for n in whole if not n.endswith(HIDDEN)]
    for name in rest:
        whole[name].requires_grad_()
    groups = [
        {"params": [whole[n] for n in rest if ("norm" in n) == norm],
         "weight_decay": 0.0 if norm else decay}
        for norm in (True, False)
    ]  # fmt: skip
    adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        engine.train_step(rank_batches(case, step, 0), lr)
        grads = {
            g.spec.name: g.tensor.clone().view(g.spec.shape) for g in engine.optimizer.named_grads()
        }
        for name in rest:
            whole[name].grad = grads[name]
        adamw.step()
        for name in (n for n in whole if n.endswith(HIDDEN)):
            m, g = momenta[name], grads[name]
            m.mul_(mu).add_(g, alpha=1 - mu)
            u = mu * m + (1 - mu) * g if changes.get("optimizer.muon_nesterov", True) else m
            whole[name].mul_(1 - lr * decay)
            pairs = zip(split(name, whole[name], 2), split(name, u, 2), strict=True)
            for weight, direction in pairs:
                matrix = direction.reshape(-1, direction.shape[-1])
                size = 0.2 * math.sqrt(max(matrix.shape))
                if changes.get("optimizer.muon_scale") == "spectral":
                    size = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
                solved = plain_orthogonalise(matrix, changes.get("optimizer.muon_steps", 5))
                weight.sub_(lr * size * solved.view(weight.shape))
    return {name: weight.detach() for name, weight in whole.items()} | {
        f"momentum/{name}": m for name, m in momenta.items() if name.endswith(HIDDEN)
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "optimizer.muon_nesterov": False,
            "optimizer.muon_scale": "spectral",
            "optimizer.muon_momentum": 0.8,
            "optimizer.muon_steps": 3,
        },
    ],
    ids=["default", "other"],
)
def test_equals_the_formula_on_whole_matrices(settings: dict[str, Any]) -> None:
    case = Case(kv_heads=2)
    changes = {"optimizer.name": "muon", **settings}
    want = plain_muon(case, changes)
    got = serial(case, tuple(changes.items()))
    # the gradients of the last steps come from weights that differ by rounding already
    for name in (n for n in want if not n.startswith("momentum/")):
        scale = float(want[name].abs().max())
        error = (torch.from_numpy(got.tensors[f"param/{name}"]) - want[name]).abs().max()
        assert float(error) <= 100 * PLAIN_FLOAT64 * scale, name
    moments = {n for n in got.tensors if n.startswith(("exp_avg/", "exp_avg_sq/", "momentum/"))}
    assert {n for n in moments if n.endswith(HIDDEN)} == {n for n in want if "momentum/" in n}


LAYOUTS = [
    Case(tp=2, sp=True, dp=2, zero=1, kv_heads=2, m=1),
    Case(tp=2, pp=2, kv_heads=2, tied=True, mask="ragged"),
    Case(pp=2, vpp=2, schedule="interleaved", dp=2, zero=1, kv_heads=2, mask="documents"),
    Case(dp=3, zero=1, kv_heads=2, m=1),
    Case(tp=4, kv_heads=4, overlap=False),
    Case(tp=2, dp=2, zero=1, family="gpt2", dropout=True, m=1),
    Case(tp=2, sp=True, pp=2, dp=2, zero=1, kv_heads=2, recompute="full"),
]


@pytest.mark.long
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_layout_equals_one_process(pool: RankPool, case: Case) -> None:
    errors = compare(outcome(pool, case, MUON), serial(case, MUON))
    assert {"momentum", "param", "grad", "exp_avg"} <= set(errors)
    bad = {kind: error for kind, error in errors.items() if not error <= PARITY_FLOAT64}
    assert not bad, bad
