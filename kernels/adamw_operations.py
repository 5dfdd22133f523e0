"""AdamW over flat runs, and sums of squares: the interface that every set of kernels implements.

A *plan* is made once from the runs and then called every step. Two properties define the work that
remains for the caller: `takes_factor` (the plan multiplies gradients by a factor as it reads them;
otherwise the caller has multiplied them) and `writes_low` (the plan also writes the 16-bit copy of
the weights).

The rule, for weight w, gradient g and moments m, v, at update number t (from 1):

    w <- w * (1 - lr * weight_decay)
    m <- beta1 * m + (1 - beta1) * g          v <- beta2 * v + (1 - beta2) * g^2
    w <- w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

(Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; decay is scaled by lr, as torch
does.) Independent of ranks and of named parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True)
class AdamWRun:
    """A contiguous range of state whose elements share a learning-rate scale and a decay.

    All tensors are 1-D and of equal length: weight (or master weight), gradient, moments, and the
    16-bit copy of the weight, or None. Weight and gradient have one type; moments have that type or
    are bfloat16. `lr_scale` multiplies the step's learning rate.
    """

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    low: Tensor | None = None
    lr_scale: float = 1.0
    weight_decay: float = 0.0


class AdamWSettings(NamedTuple):
    """The hyperparameters that all runs share."""

    beta1: float
    beta2: float
    eps: float


class AdamWPlan(Protocol):
    """Updates a fixed set of runs in place."""

    @property
    def takes_factor(self) -> bool:
        """True if gradients are multiplied as they are read; otherwise `factor` must be 1."""
        ...

    @property
    def writes_low(self) -> bool:
        """True if `low` of every run gets the new weight, rounded."""
        ...

    def update(self, lr: float, num_updates: int, factor: float) -> None:
        """Update all runs once with learning rate `lr`; `num_updates` is t, from 1."""
        ...


def check_count(num_updates: int) -> None:
    """Raise ValueError for an update whose bias corrections would divide by zero."""
    if num_updates < 1:
        raise ValueError(f"adamw: num_updates={num_updates}, expected 1 or more: the first is 1")
