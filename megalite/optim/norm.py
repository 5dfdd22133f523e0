"""The global gradient norm, the check that an update can use it, and clipping. Updates no weights.

Norm: the 2-norm over every parameter of the whole model, each counted once: a parameter that all
tp ranks hold counts on tp rank 0 only, the second copy of a tied weight never, and replicas of one
dp_cp group count once. Squares are summed in float64; one all-reduce over the world makes the
result the same bits on every rank, so every rank takes the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.distributed import comm
from megalite.distributed.mesh import Axis
from megalite.errors import MegaliteError
from megalite.kernels import Kernels


class NonFiniteGradientError(MegaliteError):
    """Gradients are not finite, and the settings end the run (or too many steps were skipped)."""


@dataclass(frozen=True)
class GradNorm:
    """The norm before clipping, and the number of ranks with an inf or nan in their gradients."""

    value: float
    num_bad_ranks: int

    @property
    def finite(self) -> bool:
        """True if all gradients are, and their norm has not overflowed."""
        return self.num_bad_ranks == 0 and math.isfinite(self.value)

    def fits(self, factor: float, dtype: torch.dtype) -> bool:
        """True if gradients, and squares of gradients, have a value in `dtype` once multiplied.

        The norm is summed in more bits than the moments have, and bounds every element: so a
        gradient that would make a moment inf is seen without a look at any.
        """
        limits = torch.finfo(dtype)
        largest = math.sqrt(limits.max) / 2
        return self.finite and factor >= limits.tiny and self.value * factor <= largest


@torch.no_grad()
def global_norm(
    counted: Sequence[Tensor],
    uncounted: Sequence[Tensor],
    world: Axis,
    device: torch.device,
    ops: Kernels,
) -> GradNorm:
    """Norm over all ranks' `counted` gradients; `uncounted` ones are only checked to be finite.

    Both may be empty (a stage without parameters): the collective happens on every rank.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    sums[0] = ops.square_sums(counted, device)
    others = ops.square_sums(uncounted, device)
    sums[1] = (~torch.isfinite(sums[0] + others)).double()
    comm.all_reduce(sums, world)
    squares, bad = sums.tolist()
    return GradNorm(math.sqrt(squares) if squares >= 0 else math.nan, int(bad))


def clip_coefficient(norm: float, clip: float | None) -> float:
    """Factor for every gradient: `min(1, clip / (norm + 1e-6))`, 1 when `clip` is None."""
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
