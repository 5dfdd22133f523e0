"""Rows of experts and their products as custom operators; shapes as in `plain.moe`.

Their gradients are registered here and not in `autograd`, as they are these operators themselves:
the gradient of permute is unpermute, and the reverse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.kernels.arguments import rows_readable
from megalite.kernels.operators.checks import check_offsets, check_row_values
from megalite.kernels.operators.common import (
    new_stats,
    operator,
    ops_of,
    ops_of_index,
    stated_types,
)
from megalite.kernels.plain.moe import RowMap

Grads = tuple[Tensor | None, ...]


@operator("megalite::expert_rows")
def expert_rows(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(row[T, K], offset[E + 1]), int32: the map that sorts copies of tokens by expert."""
    row_TK, offset_E1 = ops_of_index(expert_TK).expert_rows(expert_TK, num_experts)
    return row_TK, offset_E1


@expert_rows.register_fake
def _(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    row_TK = expert_TK.new_empty(expert_TK.shape, dtype=torch.int32)
    return row_TK, expert_TK.new_empty(num_experts + 1, dtype=torch.int32)


@operator("megalite::permute")
def permute(x_TD: Tensor, row_TK: Tensor, offset_E1: Tensor) -> Tensor:
    """y[R, D]: each copy of a token in its row."""
    check_row_values("permute", row_TK)
    return ops_of(x_TD).permute(x_TD, RowMap(row_TK, offset_E1))


@permute.register_fake
def _(x_TD: Tensor, row_TK: Tensor, offset_E1: Tensor) -> Tensor:
    return x_TD.new_empty(row_TK.numel(), x_TD.shape[1])


@operator("megalite::unpermute")
def unpermute(y_RD: Tensor, row_TK: Tensor, offset_E1: Tensor, weight_TK: Tensor | None) -> Tensor:
    """out[T, D]: the sum of a token's rows, times its router weights."""
    check_row_values("unpermute", row_TK)
    return ops_of(y_RD).unpermute(y_RD, RowMap(row_TK, offset_E1), weight_TK)


@unpermute.register_fake
def _(y_RD: Tensor, row_TK: Tensor, offset_E1: Tensor, weight_TK: Tensor | None) -> Tensor:
    return y_RD.new_empty(len(row_TK), y_RD.shape[1])


@operator("megalite::unpermute_grad")
def unpermute_grad(
    dout_TD: Tensor, y_RD: Tensor, row_TK: Tensor, offset_E1: Tensor, weight_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """(dy[R, D], dweight[T, K]) of a weighted `unpermute`."""
    rows = RowMap(row_TK, offset_E1)
    return ops_of(y_RD).unpermute_grad(dout_TD, y_RD, rows, weight_TK)


@unpermute_grad.register_fake
def _(
    dout_TD: Tensor, y_RD: Tensor, row_TK: Tensor, offset_E1: Tensor, weight_TK: Tensor
) -> tuple[Tensor, Tensor]:
    return y_RD.new_empty(y_RD.shape), weight_TK.new_empty(weight_TK.shape)


@operator("megalite::grouped_linear")
def grouped_linear(x_RD: Tensor, weight_EFD: Tensor, offset_E1: Tensor) -> Tensor:
    """y[R, F] = x @ weight[e]^T for the rows of each expert e."""
    check_offsets("grouped_linear", offset_E1, len(x_RD))
    with stated_types(x_RD):
        return ops_of(x_RD).grouped_linear(x_RD, weight_EFD, offset_E1)


@grouped_linear.register_fake
def _(x_RD: Tensor, weight_EFD: Tensor, offset_E1: Tensor) -> Tensor:
    return x_RD.new_empty(len(x_RD), weight_EFD.shape[1])


@operator("megalite::grouped_linear_grad")
def grouped_linear_grad(
    dy_RF: Tensor, x_RD: Tensor, weight_EFD: Tensor, offset_E1: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx[R, D], dweight[E, F, D] in the summing type)."""
    ops, dweight_EFD = ops_of(x_RD), new_stats(x_RD, *weight_EFD.shape)
    with stated_types(x_RD):
        ops.grouped_weight_grad_(dweight_EFD, dy_RF, x_RD, offset_E1, accumulate=False)
        return ops.grouped_linear_input_grad(dy_RF, weight_EFD, offset_E1), dweight_EFD


@grouped_linear_grad.register_fake
def _(dy_RF: Tensor, x_RD: Tensor, weight_EFD: Tensor, offset_E1: Tensor) -> tuple[Tensor, Tensor]:
    return x_RD.new_empty(x_RD.shape), new_stats(x_RD, *weight_EFD.shape)


def _keep_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _permute(ctx: Any, dy_RD: Tensor) -> Grads:
    row_TK, offset_E1 = ctx.saved_tensors
    return unpermute(rows_readable(dy_RD), row_TK, offset_E1, None), None, None


def _keep_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y_RD, row_TK, offset_E1, weight_TK = inputs
    # without weights the rows themselves play no part in their gradient
    ctx.save_for_backward(None if weight_TK is None else y_RD, row_TK, offset_E1, weight_TK)


def _unpermute(ctx: Any, dout_TD: Tensor) -> Grads:
    y_RD, row_TK, offset_E1, weight_TK = ctx.saved_tensors
    dout_TD = rows_readable(dout_TD)
    if weight_TK is None:
        return permute(dout_TD, row_TK, offset_E1), None, None, None
    dy_RD, dweight_TK = unpermute_grad(dout_TD, y_RD, row_TK, offset_E1, weight_TK)
    return dy_RD, None, None, dweight_TK


def _keep_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_linear(ctx: Any, dy_RF: Tensor) -> Grads:
    x_RD, weight_EFD, offset_E1 = ctx.saved_tensors
    dx_RD, dweight_EFD = grouped_linear_grad(dy_RF, x_RD, weight_EFD, offset_E1)
    return dx_RD, dweight_EFD.to(weight_EFD.dtype), None


permute.register_autograd(_permute, setup_context=_keep_permute)
unpermute.register_autograd(_unpermute, setup_context=_keep_unpermute)
grouped_linear.register_autograd(_grouped_linear, setup_context=_keep_grouped)
