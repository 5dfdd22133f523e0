"""Norms by group and statistics of every parameter, measured around one optimizer step.

Each parameter is counted once at every layout: only the rank that owns a piece adds it, sums are in
float64, and one all-reduce for sums and one for maxima give every rank the same numbers.
On the steps that measure, a copy of this rank's master weights is kept during the update; on the
others nothing here runs.

In a step's line of metrics.jsonl:

* `grad_norms`: GROUP -> norm of its gradients before clipping. The groups are `embedding` (position
  embeddings too), `layers.N` (its matrices and biases), `norms` (every norm's weights) and `head`
  (none where it is tied); the root of their summed squares is `grad_norm`.
* `param_stats`: PARAMETER -> `mean`, `rms`, `max_abs` of the weights after the step, `grad_norm`
  as above, and `update_to_weight`, the norm of the step's change over the norm of the weights
  before it. Rows that pad the vocabulary are counted; they do not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.distributed import comm
from megalite.distributed.mesh import Mesh
from megalite.optim.distributed_optimizer import DistributedOptimizer, StepResult
from megalite.optim.state_tensors import StateTensor

# columns of the sums over all ranks
_SUM, _SQUARES, _GRAD_SQUARES, _UPDATE_SQUARES, _BEFORE_SQUARES = range(5)
_BLOCK = 1 << 22  # elements converted to float64 at a time


class _Parameter(NamedTuple):
    """Elements of a parameter, and the group that its norm counts in."""

    numel: int
    group: str


@dataclass(frozen=True)
class _Before:
    """This rank's owned weights before the step, in the order of named_state."""

    copies: list[Tensor]


class ParamStats:
    """Measures one optimizer's parameters. All ranks call the same methods."""

    def __init__(self, optimizer: DistributedOptimizer, mesh: Mesh, interval: int) -> None:
        self._optimizer, self._mesh, self._interval = optimizer, mesh, interval
        self._all: dict[str, _Parameter] | None = None  # every parameter of the model, by name

    def is_due(self, step: int) -> bool:
        """True for the steps (from 1) that are measured: every `interval`-th, none with 0."""
        return self._interval > 0 and step % self._interval == 0

    def before(self) -> _Before:
        """Copy the weights; call it before the step."""
        return _Before([owned.tensor.clone() for owned in self._weights()])

    @torch.no_grad()
    def after(self, before: _Before, result: StepResult) -> dict[str, Any]:
        """`grad_norms` and `param_stats` for the step's line; call it after the step."""
        parameters = self._all_parameters()
        rows = {name: row for row, name in enumerate(parameters)}
        sums, most = self._measure(before, rows)
        comm.all_reduce(sums, self._mesh.world)
        comm.all_reduce(most, self._mesh.world, op="max")
        # The record has gradients as they were before clipping, and divided by the loss scale: a
        # step without an update leaves them as they are.
        factor = result.loss_scale if result.skipped else result.clip_coefficient
        sums[:, _GRAD_SQUARES] /= factor**2
        return _report(parameters, sums.tolist(), most.tolist())

    def _measure(self, before: _Before, rows: dict[str, int]) -> tuple[Tensor, Tensor]:
        """This rank's sums [parameters, 5] and largest magnitudes [parameters], float64."""
        device = self._mesh.device
        sums = torch.zeros(len(rows), 5, dtype=torch.float64, device=device)
        most = torch.zeros(len(rows), dtype=torch.float64, device=device)
        for owned, old in zip(self._weights(), before.copies, strict=True):
            row = rows[owned.spec.name]
            _add_weights(sums[row], owned.tensor, old)
            most[row] = torch.maximum(most[row], owned.tensor.abs().max().double())
        for owned in _owned(self._optimizer.named_grads(), "grad"):
            for block in torch.split(owned.tensor, _BLOCK):
                sums[rows[owned.spec.name], _GRAD_SQUARES] += block.double().square().sum()
        return sums, most

    def _weights(self) -> list[StateTensor]:
        return _owned(self._optimizer.named_state(), "param")

    def _all_parameters(self) -> dict[str, _Parameter]:
        """Each parameter of the whole model, in an order that all ranks share."""
        if self._all is None:
            mine = {
                owned.spec.name: _Parameter(math.prod(owned.spec.shape), owned.spec.group)
                for owned in self._weights()
            }
            everyone = comm.all_gather_object(mine, self._mesh.world)
            found = {name: _Parameter(*each) for part in everyone for name, each in part.items()}
            self._all = dict(sorted(found.items(), key=lambda item: _place(item[0])))
        return self._all


def _add_weights(row: Tensor, weight: Tensor, old: Tensor) -> None:
    for now, was in zip(torch.split(weight, _BLOCK), torch.split(old, _BLOCK), strict=True):
        wide, before = now.double(), was.double()
        row[_SUM] += wide.sum()
        row[_SQUARES] += wide.square().sum()
        row[_UPDATE_SQUARES] += (wide - before).square().sum()
        row[_BEFORE_SQUARES] += before.square().sum()


def _report(
    parameters: dict[str, _Parameter], sums: Sequence[Sequence[float]], most: Sequence[float]
) -> dict[str, Any]:
    squares: dict[str, float] = {}
    stats: dict[str, dict[str, float]] = {}
    for (name, (count, group)), row, largest in zip(parameters.items(), sums, most, strict=True):
        squares[group] = squares.get(group, 0.0) + row[_GRAD_SQUARES]
        change, weights = _root(row[_UPDATE_SQUARES]), _root(row[_BEFORE_SQUARES])
        stats[name] = {
            "mean": row[_SUM] / count,
            "rms": _root(row[_SQUARES] / count),
            "max_abs": largest,
            "grad_norm": _root(row[_GRAD_SQUARES]),
            "update_to_weight": change / weights if weights else 0.0,
        }
    return {"grad_norms": {k: _root(v) for k, v in squares.items()}, "param_stats": stats}


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _owned(states: Sequence[StateTensor], kind: str) -> list[StateTensor]:
    return [s for s in states if s.owner and s.kind == kind and s.tensor.numel()]


def _place(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key that puts layers.10 after layers.9."""
    return tuple((0, int(p)) if p.isdigit() else (1, p) for p in name.split("."))
