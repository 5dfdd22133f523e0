"""AdamW over flat runs and sums of squares, in the two forms that a set of kernels offers.

A *plan* is made once from the runs and then called every step. Two questions tell a caller what is
left to do around it: `takes_factor` (does it multiply gradients as it reads them, or expect them
multiplied already) and `writes_low` (does it write the 16-bit copy of the weights, too).

The rule, for weight w, gradient g and moments m, v, at update number t (from 1):

    w <- w * (1 - lr * weight_decay)
    m <- beta1 * m + (1 - beta1) * g          v <- beta2 * v + (1 - beta2) * g^2
    w <- w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

(Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; decay is scaled by lr, as torch
does.) Knows no ranks and no parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamWRun:
    """A contiguous range of state whose elements share a rate scale and a decay.

    All are 1-D and of equal length: weight (or master), gradient, moments, and the 16-bit copy of
    the weight, or None. Weight and gradient have one type; moments have it, too, or are bfloat16.
    `lr_scale` multiplies the step's rate.
    """

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    low: Tensor | None = None
    lr_scale: float = 1.0
    weight_decay: float = 0.0


class AdamWSettings(NamedTuple):
    """What all runs share."""

    beta1: float
    beta2: float
    eps: float


class AdamWPlan(Protocol):
    """Updates a fixed set of runs in place."""

    @property
    def takes_factor(self) -> bool:
        """Gradients are multiplied as they are read; otherwise `factor` must be 1."""
        ...

    @property
    def writes_low(self) -> bool:
        """`low` of every run gets the new weight, rounded."""
        ...

    def update(self, lr: float, num_updates: int, factor: float) -> None:
        """One update with rate `lr`; `num_updates` is t, this update included."""
        ...


class AdamWOperations(Protocol):
    """What an optimizer needs of a set of kernels."""

    def adamw_plan(self, runs: Sequence[AdamWRun], settings: AdamWSettings) -> AdamWPlan: ...

    def square_sums(self, xs: Sequence[Tensor], device: torch.device) -> Tensor: ...


def check_count(num_updates: int) -> None:
    """Raise ValueError for an update whose bias corrections would divide by zero."""
    if num_updates < 1:
        raise ValueError(f"adamw: num_updates={num_updates}, expected 1 or more: the first is 1")
