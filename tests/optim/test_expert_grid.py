"""A parameter of the second grid: cut by ep, its gradient summed over edp.

Trained beside dense ones to the numbers of one process, and resumed at another ep.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.find import find_latest
from megalite.checkpoint.load import load
from megalite.checkpoint.save import save
from megalite.config import OptimizerConfig
from megalite.distributed.agree import Ranks
from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.train.state import named_pieces
from tests.optim.kit.synthetic import (
    Expected,
    differing_replicas,
    expected,
    make,
    train,
    worst_error,
)
from tests.pool import RankContext, RankPool
from tests.tolerances import PARITY_FLOAT64

STEPS, CLIP = 3, 0.1
LAYOUTS = [
    (8, {"tp": 2, "pp": 2}, (1, 2, 4)),
    (8, {"tp": 2, "cp": 2}, (2, 8)),
    (4, {}, (1, 2, 4)),
    (2, {"tp": 2}, (2,)),
]


@cache
def one_process() -> Expected:
    return expected(STEPS, OptimizerConfig(clip_grad=CLIP), experts=True)


def grids_of(optimizer: DistributedOptimizer) -> list[set[str]]:
    """The grids of each bucket's parameters."""
    buckets = [bucket for buffers in optimizer._buffers for bucket in buffers.buckets]
    return [{slot.spec.grid.name for slot in bucket.slots} for bucket in buckets]


def trained(
    ctx: RankContext, axes: dict[str, int], eps: tuple[int, ...], want: Expected
) -> list[tuple[float, list[float], list[str], list[set[str]]]]:
    """With each ep and ZeRO: the worst error, norms, differing replicas, grids of the buckets."""
    found = []
    for ep in eps:
        mesh = ctx.mesh(**axes, ep=ep)
        for zero in (0, 1):
            chunks, optimizer = make(mesh, experts=True, clip_grad=CLIP, zero=zero)
            norms = [result.grad_norm for result in train(chunks, optimizer, mesh, STEPS)]
            error = worst_error(chunks, optimizer, mesh, want)
            replicas = differing_replicas(chunks, mesh)
            found.append((error, norms, replicas, grids_of(optimizer)))
    return found


@pytest.mark.parametrize(("ranks", "axes", "eps"), LAYOUTS, ids=str)
def test_every_expert_layout_trains_to_the_serial_numbers(
    pool: RankPool, ranks: int, axes: dict[str, int], eps: tuple[int, ...]
) -> None:
    want = one_process()
    for result in pool.run(trained, ranks, axes, eps, want):
        for error, norms, differing, grids in result:
            assert error <= PARITY_FLOAT64
            assert norms == pytest.approx(want.norms, rel=PARITY_FLOAT64)
            assert differing == []
            assert all(len(grid) == 1 for grid in grids), "a bucket mixes grids"
            assert {"expert"} in grids


def resumed(ctx: RankContext, folder: str, want: Expected) -> list[float]:
    """Two steps at ep 2, then from its checkpoint the third at other sizes; errors at the end."""
    mesh = ctx.mesh(tp=2, ep=2)
    chunks, optimizer = make(mesh, experts=True, clip_grad=CLIP, zero=1)
    train(chunks, optimizer, mesh, STEPS - 1)
    state, layout = optimizer.scalars(), mesh.topology.sizes
    pieces, root = named_pieces(optimizer, mesh), Path(folder)
    save(root, 2, pieces, state=state, config={}, layout=layout, ranks=Ranks(mesh.world))
    errors = []
    for axes, ep in (({"tp": 2}, 4), ({}, 1), ({"tp": 2, "pp": 2}, 2)):
        other = ctx.mesh(**axes, ep=ep)
        chunks, optimizer = make(other, experts=True, clip_grad=CLIP, zero=1)
        found = find_latest(root, Ranks(other.world))
        assert found is not None
        load(found, named_pieces(optimizer, other), Ranks(other.world))
        scalars: Any = found.manifest.state
        optimizer.load_scalars(dict(scalars))
        optimizer.after_load()
        train(chunks, optimizer, other, 1, first_step=STEPS - 1)
        errors.append(worst_error(chunks, optimizer, other, want))
    return errors


def test_a_checkpoint_loads_at_another_ep(pool: RankPool, tmp_path: Path) -> None:
    for errors in pool.run(resumed, 4, str(tmp_path), one_process()):
        assert max(errors) <= PARITY_FLOAT64
