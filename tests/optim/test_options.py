"""Groups by pattern, averages, narrow moments and narrow reductions: numbers, bytes, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.config import OptimizerConfig
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError
from megalite.layout.bucket_plan import ROUNDED_IN_FLIGHT
from megalite.layout.sharding import Matrices, ShardSpec
from megalite.layout.topology import Topology
from megalite.run.rules import Rule, rule_of
from tests.optim.kit.synthetic import (
    NUM_SAMPLES,
    Expected,
    accumulate,
    differing_replicas,
    draw,
    expected,
    make,
    train,
    worst_error,
)
from tests.pool import RankContext, RankPool
from tests.tensor_parallel.kit.memory import AllocationMeter
from tests.tolerances import BFLOAT16_UNIT, FLOAT32, PARITY_FLOAT64

# --- groups --------------------------------------------------------------------------------------

GROUPS = [
    {"match": "layers.*", "lr_scale": 0.5},
    {"match": "*.norm", "weight_decay": 0.7},
    {"match": "embedding.weight", "lr_scale": 0.1, "weight_decay": 0.0},
    {"match": "layers.2.*", "lr_scale": 2.0},
]


def grouped(spec: ShardSpec) -> tuple[float, float]:
    """What GROUPS says, written out."""
    scale = 1.0
    if spec.name.startswith("layers."):
        scale = 2.0 if spec.name.startswith("layers.2.") else 0.5
    decay = 0.1 if spec.decay else 0.0
    if spec.name.endswith(".norm"):
        decay = 0.7
    return (0.1, 0.0) if spec.name == "embedding.weight" else (scale, decay)


def train_and_compare(
    ctx: RankContext, axes: dict[str, int], settings: dict[str, Any], want: Expected
) -> tuple[float, list[str]]:
    mesh = ctx.mesh(**axes)
    chunks, optimizer = make(mesh, **settings)
    train(chunks, optimizer, mesh, 3)
    return worst_error(chunks, optimizer, mesh, want), differing_replicas(chunks, mesh)


@pytest.mark.parametrize("axes", [{"tp": 2, "pp": 2}, {"tp": 1, "pp": 2}], ids=str)
def test_groups_and_averages_at_every_layout_equal_one_process(
    pool: RankPool, axes: dict[str, int]
) -> None:
    """A tied weight has one rule on both stages; the average follows every parameter."""
    settings = {"groups": GROUPS, "ema_decay": 0.9, "zero": 1}
    want = expected(3, OptimizerConfig.model_validate(settings), rules=grouped)
    for error, differing in pool.run(train_and_compare, 4, axes, settings, want):
        assert error <= PARITY_FLOAT64
        assert differing == []


def test_a_group_that_changes_nothing_it_should_not() -> None:
    """Later groups override what they set and leave the rest."""
    config = OptimizerConfig.model_validate({"name": "muon", "groups": GROUPS})
    matrix = ShardSpec("layers.2.up", (4, 4), matrices=Matrices())
    assert rule_of(matrix, config) == Rule("muon", 2.0, 0.1)
    groups = [*GROUPS, {"match": "*.up", "algorithm": "adamw", "weight_decay": 0.3}]
    config = OptimizerConfig.model_validate({"name": "muon", "groups": groups})
    assert rule_of(matrix, config) == Rule("adamw", 2.0, 0.3)
    assert rule_of(ShardSpec("layers.2.norm", (4,), decay=False), config) == Rule("adamw", 2.0, 0.7)


def unmatched(ctx: RankContext, match: str) -> str:
    try:
        make(ctx.mesh(tp=1, pp=2), groups=[{"match": match, "lr_scale": 0.0}])
    except ConfigError as error:
        return str(error)
    return ""


def test_a_pattern_without_a_parameter_is_refused_on_every_rank(pool: RankPool) -> None:
    assert pool.run(unmatched, 2, "final_norm.*") == [""] * 2  # on the last stage only
    first, second = pool.run(unmatched, 2, "*.bais")
    assert first == second
    assert first.startswith("optimizer.groups match='*.bais' names no parameter; remove the group ")
    assert "embedding.weight, final_norm.weight, layers.N.bias" in first


def test_groups_share_kernel_calls() -> None:
    """A run ends only where the rule changes: the flat buffers are not cut at every parameter."""
    mesh = Mesh(Topology())
    (_, plain), (_, grouped) = make(mesh, bucket_mb=10), make(mesh, bucket_mb=10, groups=GROUPS[2:])
    assert len(plain._runs) == 1 + 4 * 4 + 1  # decay changes at each norm and bias
    assert len(grouped._runs) == len(plain._runs)  # and there the new rules change, too


# --- the average of the weights ------------------------------------------------------------------


def swap(ctx: RankContext, zero: int, dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Whether all ranks see the average inside the block, its difference, and the way back."""
    mesh = ctx.mesh(tp=1)
    chunks, optimizer = make(mesh, dtype, zero=zero, ema_decay=0.5)
    train(chunks, optimizer, mesh, 2)
    optimizer.wait_params()
    before = chunks[0].forward()
    pieces = [s for s in optimizer.named_state() if s.name.startswith("ema/")]
    params = {spec.name: param for param, spec in chunks[0].named_params()}
    with optimizer.averaged_weights():
        inside = chunks[0].forward()
        parts = [params[s.spec.name].detach().view(-1)[s.start : s.stop] for s in pieces]
        rounded = all(
            torch.equal(part, s.tensor.to(dtype)) for part, s in zip(parts, pieces, strict=True)
        )
        equal = rounded and differing_replicas(chunks, mesh) == []
    after = chunks[0].forward()
    moved = not any(torch.equal(a, b) for a, b in zip(before, inside, strict=True))
    return equal, moved, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_average_takes_the_weights_place_and_gives_it_back(
    pool: RankPool, zero: int, dtype: torch.dtype
) -> None:
    assert pool.run(swap, 2, zero, dtype) == [(True, True, True)] * 2


# --- narrow reduction ----------------------------------------------------------------------------


def reduce_narrow(ctx: RankContext, zero: int) -> list[tuple[float, float]]:
    """Largest error of a reduced gradient as a share of its bound, and bytes beside fp32's."""
    mesh = ctx.mesh()
    found = []
    for step in range(2):
        settings: dict[str, Any] = {"zero": zero, "clip_grad": None}
        chunks, optimizer = make(mesh, torch.float32, grad_reduce_dtype="bfloat16", **settings)
        plain = make(mesh, torch.float32, **settings)
        sent = []
        for c, o in ((chunks, optimizer), plain):
            mesh.ledger.reset()
            accumulate(c, o, mesh, step)
            o.step(0.0)
            o.wait_params()
            ops = ("reduce_scatter", "all_reduce") if o is plain[1] else ("reduce_scatter",)
            gather = mesh.ledger.bytes_sent["all_gather", "dp_cp"] if zero == 0 else 0.0
            sent.append(sum(mesh.ledger.bytes_sent[op, "dp_cp"] for op in ops) + gather)
        worst = 0.0
        for piece in optimizer.named_grads():
            share = NUM_SAMPLES // mesh.dp_cp.size
            keys = [("in",), ("out",)] if piece.spec.name == "embedding.weight" else [()]
            ranks = [
                sum(
                    draw(piece.spec.name, *key, step, sample)(piece.spec.shape)
                    for key in keys
                    for sample in range(r * share, (r + 1) * share)
                )
                for r in range(mesh.dp_cp.size)
            ]
            parts = torch.stack([torch.as_tensor(rank) for rank in ranks])
            cut = slice(piece.start, piece.stop)
            exact, size = (x.view(-1)[cut] for x in (parts.sum(0), parts.abs().sum(0)))
            bound = BFLOAT16_UNIT * (size + (exact.abs() if zero == 0 else 0)) + FLOAT32 * size
            worst = max(worst, float(((piece.tensor - exact).abs() / bound).max()))
        found.append((worst, sent[0] / sent[1]))
    return found


@pytest.mark.parametrize("zero", [0, 1])
def test_bfloat16_reduction_rounds_each_rank_once_and_sends_half(pool: RankPool, zero: int) -> None:
    for rank in pool.run(reduce_narrow, 4, zero):
        for worst, share in rank:
            assert 0.05 < worst <= 1.0  # not exact, and within one rounding a rank
            assert share == 0.5


def copies_alive(ctx: RankContext, zero: int) -> tuple[int, int, int]:
    """Most bytes alive while gradients are reduced, those of the largest bucket's and of all."""
    mesh = ctx.mesh()
    _, optimizer = make(
        mesh, torch.float32, grad_reduce_dtype="bfloat16", zero=zero, bucket_mb=1e-4
    )
    optimizer.begin_step()
    sizes = [2 * (b.stop - b.start) for b in optimizer._buffers[0].buckets]
    with AllocationMeter() as meter:
        optimizer.finish_chunk(0)
        optimizer._reducers[0].wait()
    return meter.peak_bytes, max(sizes), sum(sizes)


@pytest.mark.parametrize("zero", [0, 1])
def test_rounded_copies_of_two_buckets_are_alive_and_not_of_all(pool: RankPool, zero: int) -> None:
    """A copy to send and one to receive; without ZeRO the gathered sums of two more buckets."""
    for peak, largest, total in pool.run(copies_alive, 2, zero):
        assert total > 6 * largest
        assert peak <= ROUNDED_IN_FLIGHT * (2 if zero else 4) * largest


# --- narrow moments ------------------------------------------------------------------------------


def test_bfloat16_moments_stay_near_and_weights_within_a_few_rounded_updates() -> None:
    """Each of four updates rounds both moments once: so much of a moment, and of what lr moves."""
    mesh = Mesh(Topology())
    (a, wide), (b, narrow) = (
        make(mesh, torch.float32, moment_dtype=name) for name in ("float32", "bfloat16")
    )
    start = [param.detach().clone() for param, _ in a[0].named_params()]
    for chunks, optimizer in ((a, wide), (b, narrow)):
        train(chunks, optimizer, mesh, 4)
    moments = zip(wide.named_state(), narrow.named_state(), strict=True)
    errors = [
        float(((y.tensor.float() - x.tensor).abs() / x.tensor.abs().max()).max())
        for x, y in moments
        if x.name.startswith("exp_avg")
    ]
    assert 0 < max(errors) <= 4 * BFLOAT16_UNIT
    for (x, _), (y, _), s in zip(a[0].named_params(), b[0].named_params(), start, strict=True):
        moved = (x.detach() - s).abs().max()
        assert float((x.detach() - y.detach()).abs().max()) <= 4 * BFLOAT16_UNIT * float(moved)


# --- bytes ---------------------------------------------------------------------------------------

BYTES: dict[str, tuple[dict[str, Any], float]] = {
    "": ({}, 12.0),
    "bf16 moments": ({"moment_dtype": "bfloat16"}, 8.0),
    "average": ({"ema_decay": 0.9}, 16.0),
    "bf16 reduction": ({"grad_reduce_dtype": "bfloat16"}, 12.0),
    "muon": ({"name": "muon"}, 12.0),
    "muon, bf16 moments": ({"name": "muon", "moment_dtype": "bfloat16"}, 8.0),
}


def measure(ctx: RankContext) -> list[tuple[str, str, float, float]]:
    """(option, type, bytes of a parameter found, of theory) after a step under ZeRO-1."""
    mesh = ctx.mesh()
    found = []
    for option, (settings, state_bytes) in BYTES.items():
        for dtype in (torch.bfloat16, torch.float16):
            chunks, optimizer = make(mesh, dtype, zero=1, **settings)
            train(chunks, optimizer, mesh, 1)
            optimizer.wait_params()
            report, buckets = optimizer.memory_report(), optimizer._buffers[0].buckets
            numel = report.num_parameters + report.num_padding
            matrices = sum(b.stop - b.start for b in buckets if b.whole)
            second = 2 if "bf16 moments" in option else 4  # bytes of a moment
            theory = 6 + (state_bytes - second * matrices / numel) / mesh.dp_cp.size
            assert (matrices > 0) == option.startswith("muon")
            found.append((option, str(dtype), report.bytes_per_parameter, theory))
    return found


def test_bytes_a_parameter_are_what_theory_says_for_each_option(pool: RankPool) -> None:
    """6 + 12 / D; moments in bf16: 6 + 8 / D; an average: 4 / D more; Muon: one moment less."""
    for rank in pool.run(measure, 4):
        for option, dtype, found, theory in rank:
            assert found == pytest.approx(theory, rel=1e-12), (option, dtype)
