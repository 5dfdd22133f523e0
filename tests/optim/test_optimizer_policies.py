"""Non-finite gradients, empty chunks, memory, traffic, and when reductions and gathers start."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

import pytest
import torch

from megalite.config import OptimizerConfig
from megalite.distributed.mesh import Mesh
from megalite.layout.bucket_plan import ALIGN
from megalite.layout.topology import Topology
from megalite.optim.distributed_optimizer import DistributedOptimizer
from tests.optim.kit.synthetic import SyntheticChunk, accumulate, layer_specs, make, train
from tests.pool import RankContext, RankPool


def skip_one(
    ctx: RankContext, bad_rank: int, bad: float, name: str, dtype: torch.dtype, settings: Any
) -> dict[str, Any]:
    """A good step, one with a bad element on one rank, a good step."""
    mesh = ctx.mesh(tp=2, pp=2)
    chunks, optimizer = make(mesh, dtype, non_finite="skip", **settings)
    train(chunks, optimizer, mesh, 1)
    optimizer.wait_params()
    live = [s.tensor for s in optimizer.named_state()]
    live += [param.detach() for chunk in chunks for param, _ in chunk.named_params()]
    before = [x.clone() for x in live]
    poison = {name: bad} if mesh.rank == bad_rank else None
    accumulate(chunks, optimizer, mesh, 1, poison)
    skipped = optimizer.step(0.01)
    untouched = all(map(torch.equal, before, live))
    after = train(chunks, optimizer, mesh, 1, first_step=2)[0]
    return {
        "skipped": skipped.skipped,
        "bad_ranks": skipped.num_bad_ranks,
        "untouched": untouched,
        "updates": (skipped.num_updates, after.num_updates),
        "norm": skipped.grad_norm,
        "after": (after.skipped, after.grad_norm.hex()),
        "finite": all(bool(x.isfinite().all()) for x in live),
    }


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    ("bad_rank", "bad", "name"),
    [
        (0, float("nan"), "layers.0.up"),
        (3, float("inf"), "layers.1.bias"),  # tp rank 1, whose copy the norm does not count
        (6, float("nan"), "embedding.weight"),  # the last stage's copy
    ],
)
def test_one_bad_element_on_one_rank_skips_everywhere(
    pool: RankPool, zero: int, bad_rank: int, bad: float, name: str
) -> None:
    """J01: weights, moments and step count untouched; the same decision on all ranks."""
    ranks = pool.run(skip_one, 8, bad_rank, bad, name, torch.float64, {"zero": zero})
    assert all(rank["skipped"] and rank["untouched"] for rank in ranks)
    assert all(rank["updates"] == (1, 2) for rank in ranks)
    assert ranks[0]["bad_ranks"] >= 1
    assert len({rank["bad_ranks"] for rank in ranks}) == 1
    assert len({rank["after"] for rank in ranks}) == 1
    assert not ranks[0]["after"][0]


# Finite in its own type and in the norm's; its square is not, in the type of the moments.
LARGE = 1e25
TOO_LARGE: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {"zero": 0}),
    (torch.float32, {"zero": 1, "name": "muon"}),
    (torch.bfloat16, {"zero": 1}),
    (torch.bfloat16, {"zero": 1, "moment_dtype": "bfloat16"}),
    (torch.float16, {"zero": 1, "loss_scale": 1.0}),
]


@pytest.mark.parametrize(("dtype", "settings"), TOO_LARGE)
@pytest.mark.parametrize("name", ["layers.0.up", "embedding.weight"])
def test_one_element_too_large_for_the_moments_skips_everywhere(
    pool: RankPool, name: str, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    ranks = pool.run(skip_one, 8, 0, LARGE, name, dtype, {"clip_grad": None, **settings})
    assert all(rank["skipped"] and rank["untouched"] and rank["finite"] for rank in ranks)
    assert all(rank["updates"] == (1, 2) and rank["bad_ranks"] == 0 for rank in ranks)
    assert [rank["norm"] for rank in ranks] == pytest.approx([LARGE] * 8, rel=1e-2)
    assert len({rank["after"] for rank in ranks}) == 1


def test_a_large_element_that_is_clipped_is_no_bad_step(pool: RankPool) -> None:
    for settings in ({}, {"name": "muon"}, {"moment_dtype": "bfloat16"}):
        clipped = {"clip_grad": 1.0, **settings}
        ranks = pool.run(skip_one, 8, 0, LARGE, "layers.0.up", torch.bfloat16, clipped)
        assert all(rank["finite"] and not rank["skipped"] for rank in ranks)
        assert all(rank["updates"] == (2, 3) for rank in ranks)


def test_a_clip_coefficient_below_float32_is_a_bad_step(pool: RankPool) -> None:
    """It would come to 0, or to a few bits, in the kernel that multiplies by it."""
    ranks = pool.run(skip_one, 8, 0, 3e38, "layers.0.up", torch.float32, {"clip_grad": 0.1})
    assert all(rank["skipped"] and rank["untouched"] for rank in ranks)


def train_with_an_empty_stage(
    ctx: RankContext, zero: Literal[0, 1], frozen: bool
) -> tuple[str, float]:
    """Two steps where the last stage has no parameter, or only frozen ones."""
    mesh = ctx.mesh(pp=2)
    empty = mesh.pp.rank == 1
    sections = [layer_specs(3 if empty else 0)] if frozen or not empty else [[], []]
    chunk = SyntheticChunk(sections, mesh, torch.float64)
    for param, _ in chunk.named_params():
        param.requires_grad_(not empty)
    config = OptimizerConfig(zero=zero, bucket_mb=0.001)
    optimizer = DistributedOptimizer([chunk], mesh, config, torch.float64, torch.device("cpu"))
    results = train([chunk], optimizer, mesh, 2)
    optimizer.wait_params()
    sent = mesh.ledger.bytes_sent["reduce_scatter", "dp_cp"]
    return results[1].grad_norm.hex(), sent


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_stage_without_trainable_parameters(pool: RankPool, zero: int, frozen: bool) -> None:
    """D05: it joins the norm and sends nothing else."""
    ranks = pool.run(train_with_an_empty_stage, 4, zero, frozen)
    assert len({norm for norm, _ in ranks}) == 1
    assert float.fromhex(ranks[0][0]) > 0
    if not frozen:
        assert [sent > 0 for _, sent in ranks] == [zero == 1, zero == 1, False, False]


DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def measure(ctx: RankContext, tp: int) -> list[dict[str, Any]]:
    """Memory and one step's traffic, for each dtype and ZeRO stage."""
    mesh = ctx.mesh(tp=tp)
    found = []
    for dtype, zero in product(DTYPES, (0, 1)):
        chunks, optimizer = make(mesh, dtype, zero=zero)
        mesh.ledger.reset()
        train(chunks, optimizer, mesh, 1)
        optimizer.wait_params()
        item = {"dtype": dtype, "zero": zero, "report": optimizer.memory_report()}
        item["num_buckets"] = len(optimizer._buffers[0].buckets)
        item["partial"] = sum(p.grad.numel() for p in optimizer._pieces if p.spec.partial)
        item["numels"] = [param.numel() for param, _ in chunks[0].named_params()]
        item["calls"], item["sent"] = dict(mesh.ledger.counts), dict(mesh.ledger.bytes_sent)
        found.append(item)
    return found


def check_memory(found: dict[str, Any], dp: int) -> None:
    report, dtype = found["report"], found["dtype"]
    shards = dp if found["zero"] else 1
    grad_size = 8 if dtype == torch.float64 else 4
    state_size = (12 if dtype == torch.bfloat16 else 2 * grad_size) / shards
    numel = report.num_parameters + report.num_padding
    assert report.num_parameters == sum(found["numels"])
    assert report.num_padding < ALIGN * (len(found["numels"]) + dp * found["num_buckets"])
    assert report.state_bytes == numel * state_size
    assert report.master_bytes == (numel * 4 // shards if dtype == torch.bfloat16 else 0)
    assert report.total_bytes == numel * (dtype.itemsize + grad_size + state_size)
    share = report.num_padding / numel
    assert report.padding_bytes == pytest.approx(share * report.total_bytes)


def check_traffic(found: dict[str, Any], tp: int, dp: int) -> None:
    dtype, buckets = found["dtype"], found["num_buckets"]
    grad_size = 8 if dtype == torch.float64 else 4
    numel = found["report"].num_parameters + found["report"].num_padding
    ranks, share = tp * dp, (dp - 1) / dp
    theory = {("all_reduce", "world"): (1, 2 * (ranks - 1) / ranks * 2 * 8)}  # two float64
    if found["partial"] and tp == 2:
        theory["all_reduce", "tp"] = (1, found["partial"] * grad_size)
    if dp > 1 and found["zero"]:
        theory["reduce_scatter", "dp_cp"] = (buckets, share * numel * grad_size)
        theory["all_gather", "dp_cp"] = (buckets, share * numel * dtype.itemsize)
    elif dp > 1:
        theory["all_reduce", "dp_cp"] = (buckets, 2 * share * numel * grad_size)
    assert found["calls"] == {key: count for key, (count, _) in theory.items()}
    assert found["sent"] == pytest.approx({key: sent for key, (_, sent) in theory.items()})


@pytest.mark.parametrize(("num_ranks", "tp"), [(2, 2), (3, 1), (4, 2), (8, 2)])
def test_memory_and_traffic_are_what_theory_says(pool: RankPool, num_ranks: int, tp: int) -> None:
    """F06: 6 + 12 / D bytes a parameter in bf16, no second copy of fp32 weights."""
    for rank in pool.run(measure, num_ranks, tp):
        for found in rank:
            check_memory(found, num_ranks // tp)
            check_traffic(found, tp, num_ranks // tp)
            assert found["num_buckets"] > 2


def launches(ctx: RankContext, overlap: bool, in_order: bool) -> dict[str, list[int]]:
    """How many reductions have started after each contribution, and gathers wait per section."""
    mesh = ctx.mesh()
    chunks, optimizer = make(
        mesh, overlap_grad_reduce=overlap, overlap_param_gather=overlap, bucket_mb=1e-5
    )
    chunk = chunks[0]
    key = ("reduce_scatter", "dp_cp")
    optimizer.begin_step()
    optimizer.expect_last(0)
    named = chunk.named_params()
    started = []
    for param, spec in reversed(named) if in_order else named:
        for _ in range(spec.contributions):
            chunk.grads.add(param, lambda buffer: buffer.add_(1.0))
            started.append(mesh.ledger.counts[key])
    optimizer.finish_chunk(0)
    started.append(mesh.ledger.counts[key])
    optimizer.step(0.1)
    pending = [len(optimizer._gathers[0]._pending)]
    for section in range(len(chunk.sections())):
        assert chunk.before_section is not None
        chunk.before_section(section)
        pending.append(len(optimizer._gathers[0]._pending))
    return {"started": started, "pending": pending}


def test_reductions_start_as_buckets_fill_and_gathers_end_at_first_use(pool: RankPool) -> None:
    """One parameter a bucket: it goes with its last contribution, not with an earlier one."""
    uses = [1, *[1, 1, 2, 1] * 4, 2]  # reverse use order: final norm, layers, tied embedding
    total = len(uses)
    filled = [n + (i + 1 == use) for n, use in enumerate(uses) for i in range(use)]
    for found in pool.run(launches, 2, True, True):
        assert found["started"] == [*filled, total]
        assert found["pending"] == [total, 17, 13, 9, 5, 1, 0]


def test_reductions_start_in_bucket_order_whatever_order_gradients_come_in(pool: RankPool) -> None:
    for found in pool.run(launches, 2, True, False):
        assert set(found["started"][:-2]) == {0}  # the first bucket filled last, and held up all
        assert found["started"][-2:] == [18, 18]


def test_nothing_starts_early_without_overlap(pool: RankPool) -> None:
    for found in pool.run(launches, 2, False, True):
        assert set(found["started"]) == {0}
        assert set(found["pending"]) == {0}


def test_a_contribution_too_many_is_noticed() -> None:
    mesh = Mesh(Topology())
    chunks, optimizer = make(mesh)
    optimizer.begin_step()
    optimizer.expect_last(0)
    chunks[0].backward(0, 0)
    with pytest.raises(AssertionError, match="after its last expected"):
        chunks[0].backward(0, 1)
