"""The optimizer's passes over flat memory, and casts, as custom operators."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.kernels.operators import checks
from megalite.kernels.operators.common import operator, ops_of


@operator("megalite::adamw_", mutates_args=("weight", "exp_avg", "exp_avg_sq", "low"))
def adamw_(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    low: Tensor | None,
) -> None:
    """One AdamW update in place of flat tensors; `low` gets the new weight in its own type.

    hyper: float32 [4] on the device = lr, 1 - beta1^t, 1 - beta2^t, factor of the gradient.
    """
    checks.check_adamw(
        weight, grad, exp_avg, exp_avg_sq, hyper, low,
        beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
    )  # fmt: skip
    ops_of(weight).adamw_(
        weight, grad, exp_avg, exp_avg_sq, hyper,
        beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, low=low,
    )  # fmt: skip


@adamw_.register_fake
def _(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    low: Tensor | None,
) -> None:
    return None


@operator("megalite::sum_squares")
def sum_squares(x: Tensor) -> Tensor:
    """Sum of squares of a tensor, in a fixed order: float64, 0-d."""
    checks.check_tensor("sum_squares", "x", x, checks.FLOATS)
    return ops_of(x).square_sums([x.contiguous().flatten()], x.device)


@sum_squares.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float64)


@operator("megalite::scale_cast")
def scale_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in another type, saturated at its largest number; NaN stays NaN."""
    checks.check_cast(x, scale, dtype)
    return ops_of(x).scale_cast(x.contiguous(), scale, dtype)


@scale_cast.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)
