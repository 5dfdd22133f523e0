"""The optimizer's passes over flat memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.functional.checks import (
    FLOATS,
    PARAMETER,
    WIDE,
    Arg,
    check,
    check_range,
)
from megalite.kernels.functional.operator import operator
from megalite.kernels.operations import Kernels


def _update(
    ops: Kernels, weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, hyper: Tensor, *others: Any
) -> None:
    # Bias corrections of update 0 divide by zero. On a GPU, reading them would wait.
    if hyper.device.type == "cpu" and not bool((hyper[1:3] > 0).all()):
        raise ValueError(
            f"adamw_: hyper holds bias corrections of {hyper[1:3].tolist()}, expected above 0: the "
            "first update is number 1"
        )
    beta1, beta2, eps, weight_decay, low = others
    ops.adamw_(
        weight, grad, m, v, hyper,
        beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, low=low,
    )  # fmt: skip


_adamw_ = operator(
    "adamw_(Tensor(a!) weight, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq,"
    " Tensor hyper, float beta1, float beta2, float eps, float weight_decay, Tensor(d!)? low)"
    " -> ()",
    _update,
    lambda *_: None,
    mutates=("weight", "exp_avg", "exp_avg_sq", "low"),
)


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
    low: Tensor | None = None,
) -> None:
    """One AdamW update in place of flat tensors of one length; `low` gets the new weight, rounded.

    hyper: float32 [4] on the device = lr, 1 - beta1^t, 1 - beta2^t, factor of the gradient, for
    update t from 1. weight: float32 (the master weight), or float64 with a float64 hyper; grad,
    moments and low: any storage type. weight_decay is scaled by lr, as torch.optim.AdamW does.
    """
    flat = {
        "weight": Arg(weight, WIDE, "elements"),
        "grad": Arg(grad, PARAMETER, "elements"),
        "exp_avg": Arg(exp_avg, PARAMETER, "elements"),
        "exp_avg_sq": Arg(exp_avg_sq, "exp_avg", "elements"),
        "low": Arg(low, PARAMETER, "elements", optional=True),
    }
    check("adamw_", **flat, hyper=Arg(hyper, WIDE, "4"))
    if hyper.dtype not in (torch.float32, weight.dtype):
        raise TypeError(f"adamw_: hyper is {hyper.dtype}, expected float32 or the weight's type")
    for x in (weight, grad, exp_avg, exp_avg_sq, low):
        if x is not None and not x.is_contiguous():
            raise ValueError(f"adamw_: a tensor has stride {x.stride(0)}, expected flat buffers")
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        check_range("adamw_", name, value, 0.0, 1.0)
    for name, value in (("eps", eps), ("weight_decay", weight_decay)):
        check_range("adamw_", name, value, 0.0, math.inf)
    _adamw_(weight, grad, exp_avg, exp_avg_sq, hyper, beta1, beta2, eps, weight_decay, low)


_sum_squares = operator(
    "sum_squares(Tensor x) -> Tensor total",
    lambda ops, x: ops.square_sums([x.contiguous().flatten()], x.device),
    lambda x: x.new_empty((), dtype=torch.float64),
)


def sum_squares(x: Tensor) -> Tensor:
    """Sum of squares of a tensor of any shape, in a fixed order: float64, 0-d, no gradient."""
    check("sum_squares", x=Arg(x, FLOATS))
    total: Tensor = _sum_squares(x)
    return total
