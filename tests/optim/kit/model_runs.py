"""The parity cases' model with optimizer and precision settings of a test's own."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from megalite.checkpoint.pieces import NamedPiece
from megalite.config import RunConfig
from megalite.distributed import comm
from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.train.engine import Engine
from megalite.train.state import named_pieces
from tests.parity.case import STEPS, Case, config_of, rank_batches
from tests.parity.run import Outcome, assemble, grad_pieces
from tests.pool import RankPool

Changes = tuple[tuple[str, Any], ...]  # dotted settings, hashable so that references are kept


def changed(config: RunConfig, changes: Changes) -> RunConfig:
    """The config with settings replaced, checked again."""
    tree = config.model_dump()
    for name, value in changes:
        section, key = name.split(".")
        tree[section][key] = value
    return RunConfig.model_validate(tree)


def engine_of(mesh: Mesh, case: Case, num_layers: int, changes: Changes) -> Engine:
    return Engine(changed(config_of(case, num_layers), changes), mesh)


def train_on(mesh: Mesh, case: Case, num_layers: int, changes: Changes) -> dict[str, Any]:
    """One rank's losses, norms and state after a few steps, in float64.

    Gradients are those of the last step ("grad/...") and of the first one ("first/...").
    """
    engine = engine_of(mesh, case, num_layers, changes)
    losses, norms, held = [], [], []
    for step in range(STEPS):
        loss, result = engine.train_step(rank_batches(case, step, mesh.dp.rank), 1e-2)
        losses.append(float(comm.all_reduce(loss, mesh.world)))
        norms.append(result.grad_norm)
        if step == 0:
            held += values_of(grad_pieces(engine), "first")
    held += values_of([*named_pieces(engine.optimizer, engine.mesh), *grad_pieces(engine)])
    return {"losses": losses, "norms": norms, "held": held}


def values_of(pieces: list[NamedPiece], kind: str | None = None) -> list[Any]:
    """(name, shape, offsets, sizes, values) a rank holds; `kind` replaces a name's first part."""
    return [
        (
            piece.name if kind is None else f"{kind}/{piece.name.split('/', 1)[1]}",
            piece.shape,
            box.offsets,
            box.sizes,
            view.double().numpy().copy(),
        )
        for piece in pieces
        for box, view in piece.rectangles()
    ]


def train_rank(ctx: Any, case: Case, num_layers: int, changes: Changes) -> dict[str, Any]:
    mesh = ctx.mesh(tp=case.tp, pp=case.pp, dp=case.dp)
    return train_on(mesh, case, num_layers, changes)


def outcome(pool: RankPool, case: Case, changes: Changes, num_layers: int = 5) -> Outcome:
    """All ranks' results together; replicas must hold the same bits."""
    return assemble(pool.run(train_rank, case.world_size, case, num_layers, changes))


@cache
def serial(case: Case, changes: Changes, num_layers: int = 5) -> Outcome:
    """The same model and data in this process alone."""
    torch.set_num_threads(1)
    return assemble([train_on(Mesh(Topology()), case.reference(), num_layers, changes)])
