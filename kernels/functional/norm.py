"""RMSNorm and LayerNorm over the last dim, alone or of a sum."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from megalite.kernels.functional.checks import FLOATS, PARAMETER, Arg, check, check_range
from megalite.kernels.functional.operator import new, new_stats, operator, rows
from megalite.kernels.operations import Kernels


def _compute_grad(ops: Kernels, *others: Any) -> tuple[Tensor | None, ...]:
    dx, *rows = ops.norm_grad(*others)
    return dx, *(None if x is None else x.sum(0) for x in rows)


_norm_grad = operator(
    "norm_grad(Tensor dy, Tensor s, Tensor weight, Tensor? mean, Tensor rstd, Tensor? ds)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _compute_grad,
    lambda dy, s, weight, mean, *_: (
        new(s),
        new_stats(s, len(weight)),
        None if mean is None else new_stats(s, len(weight)),
    ),
)


def _gradient(
    dy: Tensor, s: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor
) -> dict[str, Tensor]:
    """Gradients by name, given the mean, which RMSNorm has not, rstd, and ds of a sum."""
    mean, rstd, *ds = others
    mean_of = None if bias is None else mean
    dx, dweight, dbias = _norm_grad(dy, s, weight, mean_of, rstd, *ds or (None,))
    return {"dx": dx, "dweight": dweight, "dbias": dbias, "dresidual": dx.clone() if ds else dx}


def _compute(ops: Kernels, x: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    y, _, mean, rstd = ops.norm(x, *others)
    return y, mean, rstd


def _stats(x: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tensor]:
    return None if bias is None else new_stats(x, len(x), 1), new_stats(x, len(x), 1)


_norm = operator(
    "norm(Tensor x, Tensor weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    _compute,
    lambda x, weight, bias, eps: (new(x), *_stats(x, bias)),
    lambda dy, x, weight, bias, mean, rstd: _gradient(dy, x, weight, bias, mean, rstd),
)
_add_norm = operator(
    "add_norm(Tensor x, Tensor weight, Tensor? bias, float eps, Tensor residual)"
    " -> (Tensor y, Tensor s, Tensor mean, Tensor rstd)",
    "norm",
    lambda x, weight, bias, *_: (new(x), new(x), *_stats(x, bias)),
    lambda dy, s, weight, bias, mean, rstd, ds: _gradient(dy, s, weight, bias, mean, rstd, ds),
)


def _check(operation: str, x: Tensor, eps: float, **others: Arg) -> None:
    sizes = check(operation, x=Arg(x, FLOATS, "..., columns"), **others)
    if not sizes["columns"]:
        raise ValueError(f"{operation}: x has shape {tuple(x.shape)}, expected columns to norm")
    check_range(operation, "eps", eps, 0.0, math.inf)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim."""
    _check("rms_norm", x, eps, weight=Arg(weight_D, PARAMETER, "columns"))
    y: Tensor = _norm(rows(x), weight_D.contiguous(), None, eps)[0]
    return y.view(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_D: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(norm of s, s) with s = x + residual, rounded to its type before the norm."""
    weight, other = Arg(weight_D, PARAMETER, "columns"), Arg(residual, "x", "x")
    _check("add_rms_norm", x, eps, residual=other, weight=weight)
    y, s, *_ = _add_norm(rows(x), weight_D.contiguous(), None, eps, rows(residual))
    return y.view(x.shape), s.view(x.shape)


def layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim."""
    weight, bias = Arg(weight_D, PARAMETER, "columns"), Arg(bias_D, PARAMETER, "columns")
    _check("layer_norm", x, eps, weight=weight, bias=bias)
    y: Tensor = _norm(rows(x), weight_D.contiguous(), bias_D.contiguous(), eps)[0]
    return y.view(x.shape)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(LayerNorm of s, s) with s = x + residual."""
    weight, bias = Arg(weight_D, PARAMETER, "columns"), Arg(bias_D, PARAMETER, "columns")
    _check("add_layer_norm", x, eps, residual=Arg(residual, "x", "x"), weight=weight, bias=bias)
    weight_D, bias_D = weight_D.contiguous(), bias_D.contiguous()
    y, s, *_ = _add_norm(rows(x), weight_D, bias_D, eps, rows(residual))
    return y.view(x.shape), s.view(x.shape)
