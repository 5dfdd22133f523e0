"""Bias + GeLU in Triton, forward and backward, in the tanh and the erf form; squared ReLU.

    erf form:     a = z * Phi(z),  Phi(z) = (1 + erf(z / sqrt(2))) / 2,  z = h + bias
    tanh form:    Phi(z) is replaced by sigmoid(2 u),  u = sqrt(2 / pi) * (z + 0.044715 z^3)
    squared ReLU: Phi(z) is replaced by max(z, 0)

sigmoid(2 u) equals the usual (1 + tanh(u)) / 2. The gradient overwrites h; the bias gradient is
summed by a fixed number of programs, whose partial rows `add_column_sums_` adds in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from megalite.kernels.arguments import (
    cdiv,
    check_float,
    check_last_contiguous,
    check_same,
    check_shape,
    num_programs,
    rows_readable,
)
from megalite.kernels.triton.launch import prepared
from megalite.kernels.triton.norm import add_column_sums_
from megalite.kernels.triton.tables import choose


@triton.jit
def phi_and_slope(z, ERF: tl.constexpr, RELU2: tl.constexpr = False):
    """(Phi(z), d(z Phi(z)) / dz)."""
    if RELU2:
        phi = tl.where(z < 0.0, 0.0, z)  # NaN stays
        slope = 2.0 * phi
    elif ERF:
        phi = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
        slope = phi + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
    else:
        square = z * z
        phi = tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * square))
        du = 1.5957691216057308 * (1.0 + 0.134145 * square)
        slope = phi + z * phi * (1.0 - phi) * du
    return phi, slope


@prepared
@triton.jit
def _gelu_kernel(
    h_ptr,
    bias_ptr,
    a_ptr,
    num_columns,
    h_stride,
    a_stride,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    ERF: tl.constexpr,
    RELU2: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    z = tl.load(h_ptr + row * h_stride + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        z += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    phi, _ = phi_and_slope(z, ERF, RELU2)
    a = (z * phi).to(a_ptr.dtype.element_ty)
    tl.store(a_ptr + row * a_stride + column, a, mask=inside)


@prepared
@triton.jit
def _gelu_grad_kernel(
    da_ptr,
    h_ptr,
    bias_ptr,
    dbias_ptr,
    num_rows,
    num_columns,
    da_stride,
    h_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    ERF: tl.constexpr,
    RELU2: tl.constexpr,
):
    program = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.zeros((COLUMNS,), dtype=tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)

    # rows in steps of the grid: each program's part of the sum is fixed by the grid's size
    dbias = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(program * ROWS, num_rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        da_at = da_ptr + (row * da_stride)[:, None] + column[None, :]
        h_at = h_ptr + (row * h_stride)[:, None] + column[None, :]
        da = tl.load(da_at, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(h_at, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
        _, slope = phi_and_slope(z, ERF, RELU2)
        dz = da * slope
        tl.store(h_at, dz.to(h_ptr.dtype.element_ty), mask=inside)
        if BIAS:
            dbias += dz

    if BIAS:
        partial = dbias_ptr + program.to(tl.int64) * num_columns + column
        tl.store(partial, tl.sum(dbias, 0), mask=column < num_columns)


def _check(operation: str, h_Tf: Tensor, bias_f: Tensor | None) -> None:
    check_float(operation, h=h_Tf, bias=bias_f)
    check_last_contiguous(operation, h=h_Tf, bias=bias_f)
    check_shape(operation, (h_Tf.shape[1],), bias=bias_f)


def gelu(h_Tf: Tensor, bias_f: Tensor | None = None, *, erf: bool = False) -> Tensor:
    """a[T, f] = gelu(h + bias); erf: the erf form instead of the tanh form.

    Raises TypeError, ValueError.
    """
    return _forward("gelu", h_Tf, bias_f, erf=erf, relu2=False)


def gelu_backward_(
    h_Tf: Tensor,
    da_Tf: Tensor,
    bias_f: Tensor | None = None,
    *,
    erf: bool = False,
    programs: int | None = None,
) -> Tensor | None:
    """Overwrite h[T, f] with its gradient; with a bias, returns partial float32 dbias[P, f].

    Raises TypeError, ValueError.
    """
    return _backward_("gelu_grad", h_Tf, da_Tf, bias_f, erf=erf, relu2=False, programs=programs)


def gelu_grad(
    da_Tf: Tensor,
    h_Tf: Tensor,
    recompute: bool = False,
    bias_f: Tensor | None = None,
    *,
    erf: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dh[T, f] in the memory of h, a[T, f] if `recompute`, dbias[f] with a bias) of `gelu`."""
    a_Tf = gelu(h_Tf, bias_f, erf=erf) if recompute else None
    dbias_Pf = gelu_backward_(h_Tf, da_Tf, bias_f, erf=erf)
    increment_version(h_Tf)  # makes autograd refuse a second backward through the same graph
    if dbias_Pf is None:
        return h_Tf, a_Tf, None
    dbias_f = dbias_Pf.new_zeros(dbias_Pf.shape[1])
    add_column_sums_(dbias_f, dbias_Pf)
    return h_Tf, a_Tf, dbias_f


def relu2(h_Tf: Tensor) -> Tensor:
    """a[T, f] = max(h, 0)^2. Raises TypeError, ValueError."""
    return _forward("relu2", h_Tf, None, erf=False, relu2=True)


def relu2_grad(
    da_Tf: Tensor, h_Tf: Tensor, recompute: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(dh[T, f] in the memory of h, a[T, f] if `recompute` or None) of `relu2`.

    Raises TypeError, ValueError.
    """
    a_Tf = relu2(h_Tf) if recompute else None
    _backward_("relu2_grad", h_Tf, da_Tf, None, erf=False, relu2=True)
    increment_version(h_Tf)  # makes autograd refuse a second backward through the same graph
    return h_Tf, a_Tf


def _forward(
    operation: str, h_Tf: Tensor, bias_f: Tensor | None, *, erf: bool, relu2: bool
) -> Tensor:
    _check(operation, h_Tf, bias_f)
    tokens, columns = h_Tf.shape
    a_Tf = h_Tf.new_empty(tokens, columns)
    if a_Tf.numel():
        use = choose("gelu")
        _gelu_kernel[(tokens, cdiv(columns, use["block"]))](
            h_Tf,
            bias_f,
            a_Tf,
            columns,
            h_Tf.stride(0),
            columns,
            BIAS=bias_f is not None,
            ERF=erf,
            RELU2=relu2,
            **use["launch"],
        )
    return a_Tf


def _backward_(
    operation: str,
    h_Tf: Tensor,
    da_Tf: Tensor,
    bias_f: Tensor | None,
    *,
    erf: bool,
    relu2: bool,
    programs: int | None = None,
) -> Tensor | None:
    _check(operation, h_Tf, bias_f)
    tokens, columns = h_Tf.shape
    da_Tf = rows_readable(da_Tf)
    check_shape(operation, (tokens, columns), da=da_Tf)
    check_same(operation, "types", h=h_Tf.dtype, da=da_Tf.dtype)

    # The grid is as large as the device for any number of rows, so that sums keep their order.
    use = choose("gelu_grad")
    blocks = max(1, cdiv(columns, use["columns"]))
    programs = programs or max(1, num_programs(h_Tf.device, use["programs_per_sm"]) // blocks)
    dbias_Pf = None
    if bias_f is not None:
        dbias_Pf = h_Tf.new_empty(programs, columns, dtype=torch.float32)

    if columns:
        _gelu_grad_kernel[(blocks, programs)](
            da_Tf,
            h_Tf,
            bias_f,
            dbias_Pf,
            tokens,
            columns,
            da_Tf.stride(0),
            h_Tf.stride(0),
            BIAS=bias_f is not None,
            ERF=erf,
            RELU2=relu2,
            **use["launch"],
        )
    return dbias_Pf
