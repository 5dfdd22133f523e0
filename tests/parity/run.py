"""Train a case for three steps and bring every number home."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from megalite.checkpoint.pieces import NamedPiece
from megalite.distributed import comm
from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.train.engine import Engine
from megalite.train.state import named_pieces
from tests.parity.case import STEPS, Case, config_of, rank_batches

Box = tuple[tuple[int, ...], tuple[int, ...]]  # global offsets, sizes


@dataclass
class Outcome:
    """Losses, norms and whole tensors ("grad/...", "param/...", "exp_avg/...") after the run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


def train_rank(ctx: Any, case: Case, num_layers: int) -> dict[str, Any]:
    """One rank of a case: losses, norms, and the pieces it holds."""
    return train_on(ctx.mesh(tp=case.tp, pp=case.pp, dp=case.dp), case, num_layers)


def train_on(mesh: Mesh, case: Case, num_layers: int) -> dict[str, Any]:
    engine = Engine(config_of(case, num_layers), mesh)
    losses, norms = [], []
    for step in range(STEPS):
        loss, result = engine.train_step(rank_batches(case, step, mesh.dp.rank), 1e-2)
        losses.append(float(comm.all_reduce(loss, mesh.world)))
        norms.append(result.grad_norm)
    engine.optimizer.wait_params()
    pieces = [*named_pieces(engine.optimizer, engine.mesh), *grad_pieces(engine)]
    held = [
        (piece.name, piece.shape, box.offsets, box.sizes, view.numpy().copy())
        for piece in pieces
        for box, view in piece.rectangles()
    ]
    weights = [  # what forward reads, whole on every dp rank: must be the same bits everywhere
        (
            f"param/{spec.name}",
            spec.shape,
            spec.local_offsets(mesh.tp.size, mesh.tp.rank),
            spec.local_shape(mesh.tp.size),
            param.detach().numpy().copy(),
        )
        for chunk in engine.chunks
        for param, spec in chunk.named_params()
    ]
    return {"losses": losses, "norms": norms, "held": held + weights}


def grad_pieces(engine: Engine) -> list[NamedPiece]:
    """The reduced gradients of the last step (clipped where the case clips) as pieces."""
    tp = engine.mesh.tp
    return [
        NamedPiece.of_shard("grad", g.spec, tp.size, tp.rank, g.tensor, g.start)
        for g in engine.optimizer.named_grads()
    ]


def assemble(results: list[dict[str, Any]]) -> Outcome:
    """Whole tensors from all ranks' pieces; AssertionError where two owners' bits differ."""
    tensors: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for rank, result in enumerate(results):
        assert result["norms"] == results[0]["norms"], f"rank {rank} saw other norms"
        assert result["losses"] == results[0]["losses"], f"rank {rank} saw other losses"
        for name, shape, offsets, sizes, values in result["held"]:
            whole = tensors.setdefault(name, np.full(shape, np.nan))
            filled = seen.setdefault(name, np.zeros(shape, dtype=bool))
            at = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            again = filled[at]
            same = whole[at][again] == values[again]
            assert same.all(), f"{name}: rank {rank} holds other bits than a rank before it"
            whole[at] = values
            filled[at] = True
    for name, filled in seen.items():
        assert filled.all(), f"{name}: {filled.size - filled.sum()} elements are on no rank"
    return Outcome(results[0]["losses"], results[0]["norms"], tensors)


@cache
def reference(case: Case, num_layers: int) -> Outcome:
    """The case in this process alone."""
    torch.set_num_threads(1)
    return assemble([train_on(Mesh(Topology()), case, num_layers)])


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference over the largest magnitude of `b`."""
    scale = float(np.abs(b).max()) or 1.0
    return float(np.abs(a - b).max()) / scale


def compare(got: Outcome, want: Outcome) -> dict[str, float]:
    """Relative errors by kind: loss, norm, grad, param, exp_avg, exp_avg_sq."""
    assert got.tensors.keys() == want.tensors.keys(), got.tensors.keys() ^ want.tensors.keys()
    errors = {
        "loss": relative_error(np.array(got.losses), np.array(want.losses)),
        "norm": relative_error(np.array(got.norms), np.array(want.norms)),
    }
    for name, tensor in got.tensors.items():
        kind = name.split("/")[0]
        errors[kind] = max(errors.get(kind, 0.0), relative_error(tensor, want.tensors[name]))
    return errors
