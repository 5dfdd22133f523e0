"""RMSNorm and LayerNorm in plain torch; shapes and types as in `plain.products`."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.kernels.plain.blocks import low_precision_on_cpu, rows_at_a_time, sum_dtype

# torch's layer norm sums the gradients of its weights row after row. For rows of mixed signs the
# error is 6e-7 in float32 at 1024 rows and 1.6e-6 at 8192 (4e-2 in 16 bits), so this is the most
# rows that one call gets.
_CHAIN_ROWS = 1024


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y[T, D], rstd[T, 1]): y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps)."""
    x = x_TD.to(sum_dtype(x_TD.dtype))
    rstd_T1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rstd_T1 = rstd_T1.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, rstd_T1).mul_(weight_D).to(x_TD.dtype), rstd_T1


def rms_norm_grad(
    dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, rstd_T1: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`: (dx[T, D] in x's dtype, dweight[D] in the summing dtype).

    The weight may have dims before its last (a row for each of several heads); x then has the same
    dims after T.

    With n = x * rstd and g = dy * weight:
    dx = rstd * (g - n * mean(g * n)), dweight = sum over T of dy * n.
    """
    dtype = rstd_T1.dtype
    dy, n = dy_TD.to(dtype), x_TD.to(dtype) * rstd_T1
    dweight_D = (dy * n).sum(0)
    g = dy * weight_D
    mean_T1 = torch.linalg.vecdot(g, n).unsqueeze(-1).div_(n.shape[-1])
    dx = g.sub_(n.mul_(mean_T1)).mul_(rstd_T1)
    return dx.to(x_TD.dtype), dweight_D


def layer_norm(
    x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y[T, D], mean[T, 1], rstd[T, 1]): y = (x - mean) * rstd * weight + bias.

    rstd = 1 / sqrt(variance + eps), the variance over D elements with D as divisor.
    """
    dtype = sum_dtype(x_TD.dtype)
    x = x_TD if low_precision_on_cpu(x_TD) else x_TD.to(dtype)  # torch widens as it reads
    y, mean_T1, rstd_T1 = torch.native_layer_norm(
        x, [x.shape[-1]], weight_D.to(dtype), bias_D.to(dtype), eps
    )
    return y.to(x_TD.dtype), mean_T1, rstd_T1


def layer_norm_grad(
    dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, mean_T1: Tensor, rstd_T1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `layer_norm`: dx[T, D] in x's dtype, dweight[D], dbias[D] in the summing dtype.

    With n = (x - mean) * rstd and g = dy * weight: dx = rstd * (g - mean(g) - n * mean(g * n)),
    dweight = sum over T of dy * n, dbias = sum over T of dy.
    """
    dtype, (tokens, columns) = rstd_T1.dtype, x_TD.shape
    grads, weight = torch.ops.aten.native_layer_norm_backward, weight_D.to(dtype)
    same = dy_TD.dtype == x_TD.dtype == dtype
    if same and tokens <= _CHAIN_ROWS:
        dx_TD, dweight_D, dbias_D = grads(
            dy_TD, x_TD, [columns], mean_T1, rstd_T1, weight, weight, [True] * 3
        )
        return dx_TD, dweight_D, dbias_D

    # Blocks bound the error of the sums, and keep widened copies of 16-bit rows in the caches. The
    # sums of each block get a row of their own; the rows are summed at the end.
    cached = _CHAIN_ROWS if same else rows_at_a_time(x_TD) // 2
    rows = max(1, min(tokens, _CHAIN_ROWS, cached))
    x_wide, dy_wide = weight.new_empty(2, 0 if same else rows, columns)
    sums = weight.new_empty(2, -(-tokens // rows), columns)  # of dy * n and of dy, over a block
    dx_TD = torch.empty_like(x_TD)
    for index, start in enumerate(range(0, tokens, rows)):
        block = slice(start, start + rows)
        x, dy, mean, rstd = x_TD[block], dy_TD[block], mean_T1[block], rstd_T1[block]
        if not same:
            x, dy = x_wide[: len(x)].copy_(x), dy_wide[: len(x)].copy_(dy)
        dx, sums[0, index], sums[1, index] = grads(
            dy, x, [columns], mean, rstd, weight, weight, [True] * 3
        )
        dx_TD[block].copy_(dx)

    dweight_D, dbias_D = (x.sum(0) for x in sums)
    return dx_TD, dweight_D, dbias_D


# --- operations ----------------------------------------------------------------------------------


def norm(
    x_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    residual_TD: Tensor | None = None,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(y[T, D], s[T, D], mean[T, 1], rstd[T, 1]) of s = x + residual, rounded before the norm.

    LayerNorm if there is a bias, else RMSNorm, which has no mean (None). offset: added to the
    weight in the summing dtype (1 for weights that are stored around 0).
    """
    weight_D = _moved(weight_D, offset)
    s_TD = x_TD if residual_TD is None else x_TD + residual_TD
    if bias_D is None:
        y_TD, rstd_T1 = rms_norm(s_TD, weight_D, eps)
        return y_TD, s_TD, None, rstd_T1
    y_TD, mean_T1, rstd_T1 = layer_norm(s_TD, weight_D, bias_D, eps)
    return y_TD, s_TD, mean_T1, rstd_T1


def norm_grad(
    dy_TD: Tensor,
    s_TD: Tensor,
    weight_D: Tensor,
    mean_T1: Tensor | None,
    rstd_T1: Tensor,
    ds_TD: Tensor | None = None,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx[T, D], dweight[P, D], dbias[P, D] or None) of `norm`; dx is the residual's gradient, too.

    Gradients of weight and bias are rows to be summed (`add_column_sums_`), here one. ds: the
    gradient that reaches s past the norm, added to dx.
    """
    weight_D = _moved(weight_D, offset)
    if mean_T1 is None:
        dx_TD, *sums = rms_norm_grad(dy_TD, s_TD, weight_D, rstd_T1)
    else:
        dx_TD, *sums = layer_norm_grad(dy_TD, s_TD, weight_D, mean_T1, rstd_T1)
    dweight_PD, *dbias_PD = (x.unsqueeze(0) for x in sums)
    dx_TD = dx_TD if ds_TD is None else dx_TD.add_(ds_TD)
    return dx_TD, dweight_PD, dbias_PD[0] if dbias_PD else None


def head_norm(
    qkv_TkgH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(y[T, k, g + 2, H], rstd): RMSNorm of each query head and key head; values are copied."""
    heads = qkv_TkgH[:, :, :-1]
    weight = _moved(_head_rows(heads, q_weight_H, k_weight_H), offset)
    normed, rstd = rms_norm(heads, weight, eps)
    return torch.cat([normed, qkv_TkgH[:, :, -1:]], 2), rstd


def head_norm_grad(
    dy_TkgH: Tensor,
    qkv_TkgH: Tensor,
    q_weight_H: Tensor,
    k_weight_H: Tensor,
    rstd: Tensor,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dqkv[T, k, g + 2, H], dq_weight[P, H], dk_weight[P, H]) of `head_norm`, rows to sum."""
    heads = qkv_TkgH[:, :, :-1]
    weight = _moved(_head_rows(heads, q_weight_H, k_weight_H), offset)
    dx, dweight = rms_norm_grad(dy_TkgH[:, :, :-1], heads, weight, rstd)
    dweight_gH = dweight.sum(0)
    return torch.cat([dx, dy_TkgH[:, :, -1:]], 2), dweight_gH[:-1], dweight_gH[-1:]


def _moved(weight: Tensor, offset: float) -> Tensor:
    """weight + offset, in the summing dtype so that a small weight keeps its digits."""
    return weight if offset == 0 else weight.to(sum_dtype(weight.dtype)) + offset


def _head_rows(heads: Tensor, q_weight_H: Tensor, k_weight_H: Tensor) -> Tensor:
    """The weight of each head of a group but its value: [g + 1, H]."""
    return torch.cat([q_weight_H.expand(heads.shape[2] - 1, -1), k_weight_H.unsqueeze(0)])
