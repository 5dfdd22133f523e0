"""add + RMSNorm and add + LayerNorm in Triton, forward and backward, and column sums.

With s = round(x + residual) (s = x without a residual), all sums in float32:

    RMSNorm:   n = s * rstd,           rstd = 1 / sqrt(mean(s^2) + eps)
    LayerNorm: n = (s - mean) * rstd,  rstd = 1 / sqrt(mean((s - mean)^2) + eps)
    y = n * (weight + offset) + bias

s is rounded to its storage type before the norm, because the backward reads the rounded value.
Backward with g = dy * (weight + offset):

    ds_total = rstd * (g - n * mean(g * n) [- mean(g)]) + ds,  dweight = sum over rows of dy * n,
    dbias = sum over rows of dy

Each of a fixed number of programs sums its own rows; a second kernel sums their partial rows in
order. Rows of more than 8192 columns leave no registers for the sums: they get a pass of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.arguments import (
    cdiv,
    check_float,
    check_last_contiguous,
    check_shape,
    next_power_of_2,
    num_programs,
    once_per_form,
    rows_readable,
    vector,
)
from megalite.kernels.triton.launch import prepared
from megalite.kernels.triton.tables import choose

MAX_COLUMNS = 16384


@prepared
@triton.jit
def _norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    offset,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTER: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < D)[None, :]

    # the sum is rounded to its storage type first: the backward reads that value
    x = tl.load(x_ptr + (row * x_stride)[:, None] + column[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    out = (row * D)[:, None] + column[None, :]
    if ADD:
        residual_at = (row * residual_stride)[:, None] + column[None, :]
        x += tl.load(residual_ptr + residual_at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(s_ptr.dtype.element_ty)
        tl.store(s_ptr + out, rounded, mask=inside)
        x = rounded.to(tl.float32)

    if CENTER:
        # columns beyond D stay 0, or they would count in the sum of squares
        mean = tl.sum(x, 1) / D
        x = tl.where(inside, x - mean[:, None], 0.0)
        tl.store(mean_ptr + row, mean, mask=row < num_rows)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)

    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32) + offset
    y = x * rstd[:, None] * weight[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=column < D, other=0.0).to(tl.float32)
        y += bias[None, :]
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)


@prepared
@triton.jit
def _norm_backward_kernel(
    dy_ptr,
    s_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    ds_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    num_rows,
    dy_stride,
    s_stride,
    ds_stride,
    offset,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTER: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    DWEIGHT: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32) + offset

    # rows in steps of the grid: each program's part of the sums is fixed by the grid's size
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        valid = row < num_rows
        inside = valid[:, None] & (column < D)[None, :]
        dy_at = (row * dy_stride)[:, None] + column[None, :]
        dy = tl.load(dy_ptr + dy_at, mask=inside, other=0.0).to(tl.float32)
        s_at = (row * s_stride)[:, None] + column[None, :]
        n = tl.load(s_ptr + s_at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
        if CENTER:
            mean = tl.load(mean_ptr + row, mask=valid, other=0.0)
            n = tl.where(inside, n - mean[:, None], 0.0)
        n = n * rstd[:, None]

        if DWEIGHT:
            dweight += dy * n
        if BIAS:
            dbias += dy

        g = dy * weight[None, :]
        dx = g - n * (tl.sum(g * n, 1) / D)[:, None]
        if CENTER:
            dx -= (tl.sum(g, 1) / D)[:, None]
        dx = dx * rstd[:, None]
        if ADD:
            ds_at = (row * ds_stride)[:, None] + column[None, :]
            dx += tl.load(ds_ptr + ds_at, mask=inside, other=0.0).to(tl.float32)
        dx_at = (row * D)[:, None] + column[None, :]
        tl.store(dx_ptr + dx_at, dx.to(dx_ptr.dtype.element_ty), mask=inside)

    partial = program.to(tl.int64) * D + column
    if DWEIGHT:
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0), mask=column < D)
    if BIAS:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0), mask=column < D)


@prepared
@triton.jit
def _norm_weight_grad_kernel(
    dy_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    dweight_ptr,
    dbias_ptr,
    num_rows,
    dy_stride,
    s_stride,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CENTER: tl.constexpr,
    BIAS: tl.constexpr,
):
    program = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)

    # rows in steps of the grid: each program's part of the sums is fixed by the grid's size
    dweight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    dbias = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(program * ROWS, num_rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        valid = row < num_rows
        inside = valid[:, None] & (column < D)[None, :]
        dy_at = (row * dy_stride)[:, None] + column[None, :]
        dy = tl.load(dy_ptr + dy_at, mask=inside, other=0.0).to(tl.float32)
        s_at = (row * s_stride)[:, None] + column[None, :]
        n = tl.load(s_ptr + s_at, mask=inside, other=0.0).to(tl.float32)
        if CENTER:
            n -= tl.load(mean_ptr + row, mask=valid, other=0.0)[:, None]
        dweight += dy * n * tl.load(rstd_ptr + row, mask=valid, other=0.0)[:, None]
        if BIAS:
            dbias += dy

    partial = program.to(tl.int64) * D + column
    tl.store(dweight_ptr + partial, tl.sum(dweight, 0), mask=column < D)
    if BIAS:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0), mask=column < D)


@prepared
@triton.jit
def _column_sum_kernel(
    partial_ptr, out_ptr, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        at = (row * num_columns)[:, None] + column[None, :]
        total += tl.load(partial_ptr + at, mask=inside, other=0.0)
    inside_out = column < num_columns
    out = tl.sum(total, 0) + tl.load(out_ptr + column, mask=inside_out, other=0.0)
    tl.store(out_ptr + column, out, mask=inside_out)


def add_column_sums_(buffer_D: Tensor, partial_PD: Tensor) -> None:
    """buffer[D] += sum over P of partial[P, D], both float32, always in the same order.

    Raises TypeError, ValueError.
    """
    rows, columns = partial_PD.shape
    check_shape("add_column_sums", (columns,), buffer=buffer_D)
    if not buffer_D.dtype == partial_PD.dtype == torch.float32:
        raise TypeError(
            f"add_column_sums: buffer is {buffer_D.dtype}, partial {partial_PD.dtype}; expected "
            "torch.float32"
        )
    if columns:
        use = choose("column_sum")
        _column_sum_kernel[(cdiv(columns, use["columns"]),)](
            partial_PD.contiguous(), buffer_D, rows, columns, **use["launch"]
        )


def _tile(columns: int, elements: int) -> tuple[int, int]:
    """(rows, columns) that a program holds: whole rows, padded, of about `elements` elements."""
    block = next_power_of_2(columns)
    return max(1, elements // block), block


def _check(operation: str, columns: int, **tensors: Tensor | None) -> None:
    """Raise TypeError, ValueError for tensors or a width that the kernels do not take."""
    check_float(operation, **tensors)
    check_last_contiguous(operation, **tensors)
    if not 0 < columns <= MAX_COLUMNS:
        raise ValueError(
            f"{operation}: {columns} columns; the triton kernel takes 1 to {MAX_COLUMNS}; "
            "use kernels.backend=reference for wider rows"
        )


@once_per_form
def _check_norm(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    operation = "rms_norm" if bias is None else "layer_norm"
    tokens, columns = x.shape
    _check(operation, columns, x=x, residual=residual, weight=weight, bias=bias)
    check_shape(operation, (tokens, columns), residual=residual)
    check_shape(operation, (columns,), weight=weight, bias=bias)


@once_per_form
def _check_norm_grad(
    dy: Tensor, s: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, ds: Tensor | None
) -> None:
    operation = "rms_norm_grad" if mean is None else "layer_norm_grad"
    tokens, columns = s.shape
    _check(operation, columns, dy=dy, s=s, weight=weight, ds=ds)
    check_shape(operation, (tokens, columns), dy=dy, ds=ds)
    check_shape(operation, (columns,), weight=weight)
    check_shape(operation, (tokens, 1), rstd=rstd, mean=mean)


def norm(
    x_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    residual_TD: Tensor | None = None,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(y[T, D], s[T, D], mean[T, 1] or None, rstd[T, 1]) of the norm of s = x + residual.

    LayerNorm if there is a bias, else RMSNorm. offset is added to the weight (1 for weights that
    are stored around 0). Without a residual s is x itself. Raises TypeError, ValueError.
    """
    _check_norm(x_TD, weight_D, bias_D, residual_TD)
    center = bias_D is not None
    tokens, columns = x_TD.shape

    # s is not written without a residual: the backward can read x.
    y_TD = x_TD.new_empty(tokens, columns)
    s_TD = x_TD if residual_TD is None else x_TD.new_empty(tokens, columns)
    rstd_T1 = x_TD.new_empty(tokens, 1, dtype=torch.float32)
    mean_T1 = torch.empty_like(rstd_T1) if center else None

    if tokens:
        use = choose("norm_forward", columns=columns)
        rows, block = _tile(columns, use["elements"])
        _norm_forward_kernel[(cdiv(tokens, rows),)](
            x_TD,
            residual_TD,
            weight_D,
            bias_D,
            y_TD,
            s_TD,
            mean_T1,
            rstd_T1,
            tokens,
            x_TD.stride(0),
            0 if residual_TD is None else residual_TD.stride(0),
            eps,
            offset,
            D=columns,
            ROWS=rows,
            BLOCK=block,
            CENTER=center,
            ADD=residual_TD is not None,
            BIAS=center,
            **use["launch"],
        )
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
    programs: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx[T, D], dweight[P, D], dbias[P, D] or None) of `norm`; `add_column_sums_` sums P.

    dx is the gradient of x and of the residual alike. ds: the gradient that reaches s through the
    residual stream. mean: of LayerNorm, None for RMSNorm. programs: P, None for the device's.
    Partial sums are float32. Raises TypeError, ValueError.
    """
    center = mean_T1 is not None
    tokens, columns = s_TD.shape
    dy_TD = rows_readable(dy_TD)
    ds_TD = None if ds_TD is None else rows_readable(ds_TD)
    rstd_T1, mean_T1 = rstd_T1.contiguous(), vector(mean_T1)
    _check_norm_grad(dy_TD, s_TD, weight_D, mean_T1, rstd_T1, ds_TD)

    # The grid is as large as the device for any number of rows, so that sums keep their order.
    use = choose("norm_backward", columns=columns)
    rows, block = _tile(columns, use["elements"])
    programs = programs or num_programs(s_TD.device, use["programs_per_sm"])
    dx_TD = s_TD.new_empty(tokens, columns)
    dweight_PD = s_TD.new_empty(programs, columns, dtype=torch.float32)
    dbias_PD = torch.empty_like(dweight_PD) if center else None

    one_pass = use["one_pass"]
    _norm_backward_kernel[(programs,)](
        dy_TD,
        s_TD,
        weight_D,
        mean_T1,
        rstd_T1,
        ds_TD,
        dx_TD,
        dweight_PD,
        dbias_PD,
        tokens,
        dy_TD.stride(0),
        s_TD.stride(0),
        0 if ds_TD is None else ds_TD.stride(0),
        offset,
        D=columns,
        ROWS=rows,
        BLOCK=block,
        CENTER=center,
        ADD=ds_TD is not None,
        BIAS=center and one_pass,
        DWEIGHT=one_pass,
        **use["launch"],
    )

    # Wide rows leave no registers for the sums beside them, so a second kernel reads dy and s again
    # in blocks of columns.
    if not one_pass:
        use = choose("norm_weight_grad")
        _norm_weight_grad_kernel[(cdiv(columns, use["columns"]), programs)](
            dy_TD,
            s_TD,
            mean_T1,
            rstd_T1,
            dweight_PD,
            dbias_PD,
            tokens,
            dy_TD.stride(0),
            s_TD.stride(0),
            D=columns,
            CENTER=center,
            BIAS=center,
            **use["launch"],
        )
    return dx_TD, dweight_PD, dbias_PD


def _head_slices(heads: int, q_weight_H: Tensor, k_weight_H: Tensor) -> list[tuple[slice, Tensor]]:
    """The query heads and the key head of a group of `heads`, each with its weight."""
    return [(slice(heads - 2), q_weight_H), (slice(heads - 2, heads - 1), k_weight_H)]


def head_norm(
    qkv_TkgH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(y[T, k, g + 2, H], rstd): RMSNorm of each query head and key head; values are copied."""
    y, rstds = torch.empty_like(qkv_TkgH), []
    for heads, weight in _head_slices(qkv_TkgH.shape[2], q_weight_H, k_weight_H):
        x = qkv_TkgH[:, :, heads]
        normed, _, _, rstd = norm(x.flatten(0, 2), weight, None, eps, offset=offset)
        y[:, :, heads] = normed.view(x.shape)
        rstds.append(rstd.view(x.shape[:3]))
    y[:, :, -1] = qkv_TkgH[:, :, -1]
    return y, torch.cat(rstds, 2)


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
    dqkv, dweights = torch.empty_like(dy_TkgH), []
    for heads, weight in _head_slices(qkv_TkgH.shape[2], q_weight_H, k_weight_H):
        dy, x = dy_TkgH[:, :, heads].flatten(0, 2), qkv_TkgH[:, :, heads]
        rstd_T1 = rstd[:, :, heads].reshape(-1, 1)
        dx, dweight, _ = norm_grad(dy, x.flatten(0, 2), weight, None, rstd_T1, offset=offset)
        dqkv[:, :, heads] = dx.view(x.shape)
        dweights.append(dweight)
    dqkv[:, :, -1] = dy_TkgH[:, :, -1]
    return dqkv, dweights[0], dweights[1]
