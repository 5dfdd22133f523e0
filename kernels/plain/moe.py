"""Mixture of experts in plain torch: rows sorted by expert, and products of each expert's rows.

Shapes: T tokens, K experts of a token, R = T * K copies of tokens, E experts, D model,
F feed-forward. Sorting is stable: the copies of an expert keep the order of their tokens. An expert
index outside 0 ... E - 1 (by convention -1) drops the copy; no capacity limits an expert. The
number of sorted rows is fixed: the rows of dropped copies follow the last expert's and hold zeros.

Everything with floating point results is differentiable by autograd; the explicit gradients are for
a backward pass without autograd.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.kernels.arguments import check_shape
from megalite.kernels.plain.blocks import sum_dtype
from megalite.kernels.plain.products import accumulate_weight_grad_, linear, linear_input_grad

MAX_COPIES = (1 << 31) - (1 << 16)  # rows are counted in 32 bits, block by block


class RowMap(NamedTuple):
    """The rows of copies of tokens sorted by expert; both tensors on the device.

    row_TK: int32 [T, K], the row of the copy; -1 - row for a dropped copy, whose row comes after
    the last expert's. offset_E1: int32 [E + 1], expert e has rows offset[e] to offset[e + 1] - 1.
    """

    row_TK: Tensor
    offset_E1: Tensor


def check_experts(operation: str, expert_TK: Tensor, num_experts: int, largest: int) -> None:
    """Raise TypeError, ValueError for expert indices or counts that `expert_rows` does not take."""
    if expert_TK.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{operation}: expert is {expert_TK.dtype}, expected int32 or int64")
    if expert_TK.dim() != 2 or expert_TK.shape[1] < 1:
        raise ValueError(
            f"{operation}: expert has shape {tuple(expert_TK.shape)}, expected [tokens, experts of "
            "a token]; pass expert.unsqueeze(1) for one expert a token"
        )
    if not 1 <= num_experts <= largest:
        raise ValueError(f"{operation}: num_experts={num_experts}, expected 1 to {largest}")
    if expert_TK.numel() > MAX_COPIES:
        raise ValueError(
            f"{operation}: {expert_TK.numel()} copies of tokens, at most {MAX_COPIES} are counted; "
            "route fewer tokens at once"
        )


def check_rows(operation: str, rows: RowMap) -> tuple[int, int]:
    """(T, K) of a map. Raises TypeError, ValueError if `expert_rows` cannot have made it."""
    for name, x, dims in (("row", rows.row_TK, 2), ("offset", rows.offset_E1, 1)):
        if x.dtype != torch.int32 or x.dim() != dims:
            raise TypeError(
                f"{operation}: {name} is {x.dtype} with {x.dim()} dimensions, expected int32 with "
                f"{dims}; pass what expert_rows gives"
            )
    tokens, copies = rows.row_TK.shape
    return tokens, copies


def check_weight(operation: str, rows: RowMap, weight_TK: Tensor | None) -> None:
    """Raise TypeError, ValueError for router weights that do not fit the map."""
    check_shape(operation, tuple(rows.row_TK.shape), weight=weight_TK)
    if weight_TK is not None and not weight_TK.is_floating_point():
        raise TypeError(f"{operation}: weight is {weight_TK.dtype}, expected floating point")


def check_groups(
    operation: str, weight_EFD: Tensor, offset_E1: Tensor, **rows_of: tuple[Tensor, int]
) -> tuple[int, int, int, int]:
    """(R, E, F, D) of a grouped product.

    rows_of: matrices [R, columns] by name, each with the dim of the weights that has as many
    columns. Raises TypeError, ValueError.
    """
    if weight_EFD.dim() != 3:
        raise ValueError(
            f"{operation}: weights have shape {tuple(weight_EFD.shape)}, expected [experts, out, "
            "in]"
        )
    if offset_E1.dtype != torch.int32:
        raise TypeError(
            f"{operation}: offset is {offset_E1.dtype}, expected int32; pass what expert_rows gives"
        )
    experts, out_columns, in_columns = weight_EFD.shape
    check_shape(operation, (experts + 1,), offset=offset_E1)
    num_rows = len(next(iter(rows_of.values()))[0])
    for name, (x, dim) in rows_of.items():
        check_shape(operation, (num_rows, weight_EFD.shape[dim]), **{name: x})
    return num_rows, experts, out_columns, in_columns


def _position(row_TK: Tensor) -> Tensor:
    """The rows of all copies, dropped ones included, as int64."""
    return row_TK.where(row_TK >= 0, -1 - row_TK).long()


# --- rows ----------------------------------------------------------------------------------------


def expert_rows(expert_TK: Tensor, num_experts: int) -> RowMap:
    """The map that sorts copies of tokens by expert. Raises TypeError, ValueError.

    expert_TK: int32 or int64 [T, K], the experts of each token.
    """
    check_experts("expert_rows", expert_TK, num_experts, MAX_COPIES)
    kept = (expert_TK >= 0) & (expert_TK < num_experts)
    key_R, order_R = expert_TK.where(kept, num_experts).flatten().sort(stable=True)
    row_R = torch.empty_like(order_R)
    row_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    row_TK = row_R.view_as(expert_TK)
    ends = torch.arange(num_experts + 1, device=key_R.device, dtype=key_R.dtype)
    offset_E1 = torch.searchsorted(key_R, ends, out_int32=True)
    return RowMap(row_TK.where(kept, -1 - row_TK).int(), offset_E1)


def permute(x_TD: Tensor, rows: RowMap) -> Tensor:
    """y[R, D]: each copy of a token in its row, 0 in dropped rows. Raises TypeError, ValueError."""
    tokens, copies = check_rows("permute", rows)
    check_shape("permute", (tokens, x_TD.shape[-1]), x=x_TD)
    copy_R = torch.empty(tokens * copies, dtype=torch.int64, device=x_TD.device)
    copy_R[_position(rows.row_TK).flatten()] = torch.arange(len(copy_R), device=x_TD.device)
    dropped_R = rows.row_TK.flatten()[copy_R] < 0
    return x_TD[copy_R // copies].masked_fill(dropped_R.unsqueeze(1), 0)


def unpermute(y_RD: Tensor, rows: RowMap, weight_TK: Tensor | None = None) -> Tensor:
    """out[T, D]: the sum of a token's rows, times its router weights if given.

    Summed in float32 at least, copy by copy, and rounded once. Raises TypeError, ValueError.
    """
    tokens, copies = check_rows("unpermute", rows)
    check_shape("unpermute", (tokens * copies, y_RD.shape[-1]), y=y_RD)
    check_weight("unpermute", rows, weight_TK)
    dtype = sum_dtype(y_RD.dtype)
    position_TK, dropped_TK = _position(rows.row_TK), rows.row_TK < 0
    out_TD = torch.zeros(tokens, y_RD.shape[-1], dtype=dtype, device=y_RD.device)
    for k in range(copies):
        dropped_T1 = dropped_TK[:, k, None]
        part_TD = y_RD[position_TK[:, k]].to(dtype).masked_fill(dropped_T1, 0)
        if weight_TK is not None:
            part_TD = part_TD * weight_TK[:, k, None].to(dtype).masked_fill(dropped_T1, 0)
        out_TD = out_TD + part_TD
    return out_TD.to(y_RD.dtype)


def unpermute_grad(
    dout_TD: Tensor, y_RD: Tensor, rows: RowMap, weight_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of a weighted `unpermute`: (dy[R, D], dweight[T, K] in weight's dtype).

    dy is the token's gradient times the router weight, 0 in dropped rows; dweight is the product
    of the token's gradient with the row, 0 for dropped copies. Raises TypeError, ValueError.
    """
    tokens, copies = check_rows("unpermute_grad", rows)
    check_shape("unpermute_grad", (tokens * copies, dout_TD.shape[-1]), y=y_RD)
    check_shape("unpermute_grad", (tokens, y_RD.shape[-1]), dout=dout_TD)
    check_weight("unpermute_grad", rows, weight_TK)

    dtype = sum_dtype(y_RD.dtype)
    position_TK, kept_TK = _position(rows.row_TK), rows.row_TK >= 0
    dout = dout_TD.to(dtype)
    dy_RD = torch.empty_like(y_RD, memory_format=torch.contiguous_format)
    dweight_TK = torch.empty_like(weight_TK, dtype=dtype)

    # Masked after each product: weights and rows of dropped copies may be infinite or NaN.
    for k in range(copies):
        weight_T1 = weight_TK[:, k, None].to(dtype)
        row_T, kept_T1 = position_TK[:, k], kept_TK[:, k, None]
        dy_RD[row_T] = (dout * weight_T1).masked_fill(~kept_T1, 0).to(dy_RD.dtype)
        y_TD = y_RD[row_T].to(dtype).masked_fill(~kept_T1, 0)
        dweight_TK[:, k] = torch.linalg.vecdot(dout, y_TD).masked_fill(~kept_T1[:, 0], 0)
    return dy_RD, dweight_TK.to(weight_TK.dtype)


# --- products ------------------------------------------------------------------------------------


def grouped_linear(x_RD: Tensor, weight_EFD: Tensor, offset_E1: Tensor) -> Tensor:
    """y[R, F] = x @ weight[e]^T for the rows of each expert e, 0 in the rows after the last.

    Raises TypeError, ValueError.
    """
    rows, _, columns, _ = check_groups("grouped_linear", weight_EFD, offset_E1, x=(x_RD, 2))
    groups = list(enumerate(pairwise(offset_E1.tolist())))
    parts = [linear(x_RD[start:stop], weight_EFD[e]) for e, (start, stop) in groups]
    return torch.cat([*parts, x_RD.new_zeros(rows - int(offset_E1[-1]), columns)])


def grouped_linear_input_grad(dy_RF: Tensor, weight_EFD: Tensor, offset_E1: Tensor) -> Tensor:
    """dx[R, D] = dy @ weight[e] for the rows of each expert e, 0 in the rows after the last.

    Raises TypeError, ValueError.
    """
    operation = "grouped_linear_input_grad"
    rows, _, _, columns = check_groups(operation, weight_EFD, offset_E1, dy=(dy_RF, 1))
    groups = list(enumerate(pairwise(offset_E1.tolist())))
    parts = [linear_input_grad(dy_RF[start:stop], weight_EFD[e]) for e, (start, stop) in groups]
    return torch.cat([*parts, dy_RF.new_zeros(rows - int(offset_E1[-1]), columns)])


def grouped_weight_grad_(
    buffer_EFD: Tensor,
    dy_RF: Tensor,
    x_RD: Tensor,
    offset_E1: Tensor,
    *,
    accumulate: bool = True,
) -> None:
    """buffer[e] (+)= dy^T @ x over the rows of each expert e, summed in the buffer's dtype.

    accumulate: add to what the buffer holds, else overwrite it (with 0 for an expert without
    rows). Raises TypeError, ValueError.
    """
    check_groups("grouped_weight_grad_", buffer_EFD, offset_E1, dy=(dy_RF, 1), x=(x_RD, 2))
    if not accumulate:
        buffer_EFD.zero_()
    for e, (start, stop) in enumerate(pairwise(offset_E1.tolist())):
        accumulate_weight_grad_(buffer_EFD[e], dy_RF[start:stop], x_RD[start:stop])
