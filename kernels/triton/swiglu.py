"""SwiGLU and GeGLU in Triton: a = silu(gate) * up or gelu(gate) * up on rows that hold gate | up,
forward and backward.

The gradient overwrites gate | up, which halves the peak of the MLP's backward; the activation can
be recomputed in the same pass.
"""

from __future__ import annotations

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
    once_per_form,
    rows_readable,
)
from megalite.kernels.triton.gelu import phi_and_slope
from megalite.kernels.triton.launch import prepared
from megalite.kernels.triton.tables import choose


@prepared
@triton.jit
def _swiglu_kernel(
    h_ptr,
    a_ptr,
    num_columns,
    h_stride,
    a_stride,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    ERF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    h_at = h_ptr + row * h_stride + column
    gate = tl.load(h_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h_at + num_columns, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        phi, _ = phi_and_slope(gate, ERF)
        a = gate * phi * up
    else:
        a = gate * tl.sigmoid(gate) * up
    tl.store(a_ptr + row * a_stride + column, a.to(a_ptr.dtype.element_ty), mask=inside)


@prepared
@triton.jit
def _swiglu_grad_kernel(
    da_ptr,
    h_ptr,
    a_ptr,
    num_columns,
    da_stride,
    h_stride,
    a_stride,
    BLOCK: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    GELU: tl.constexpr,
    ERF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    h_at = h_ptr + row * h_stride + column

    # read before it is written over: a program reads and writes the same elements
    da = tl.load(da_ptr + row * da_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(h_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h_at + num_columns, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        phi, slope = phi_and_slope(gate, ERF)
        gated = gate * phi
    else:
        sigmoid = tl.sigmoid(gate)
        gated = gate * sigmoid
        slope = sigmoid + gated * (1.0 - sigmoid)

    dgate = da * up * slope
    tl.store(h_at, dgate.to(h_ptr.dtype.element_ty), mask=inside)
    tl.store(h_at + num_columns, (da * gated).to(h_ptr.dtype.element_ty), mask=inside)
    if RECOMPUTE:
        a = (gated * up).to(a_ptr.dtype.element_ty)
        tl.store(a_ptr + row * a_stride + column, a, mask=inside)


@once_per_form
def _check(h_T2f: Tensor, da_Tf: Tensor | None) -> None:
    """Raise TypeError, ValueError for tensors that the kernels do not take; da in the gradient."""
    operation = "swiglu, geglu" if da_Tf is None else "swiglu_grad, geglu_grad"
    tokens, columns = h_T2f.shape
    check_float(operation, h=h_T2f)
    check_last_contiguous(operation, h=h_T2f)
    if columns % 2:
        raise ValueError(f"{operation}: h has {columns} columns, expected an even number")
    if da_Tf is not None:
        check_shape(operation, (tokens, columns // 2), da=da_Tf)
        check_same(operation, "types", h=h_T2f.dtype, da=da_Tf.dtype)


def swiglu(h_T2f: Tensor) -> Tensor:
    """a[T, f] = silu(h[:, :f]) * h[:, f:]. Raises TypeError, ValueError."""
    return _forward(h_T2f, gelu=False, erf=False)


def swiglu_grad(
    da_Tf: Tensor, h_T2f: Tensor, recompute: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(dh[T, 2f] in the memory of h, a[T, f] if `recompute` or None) of `swiglu`.

    Raises TypeError, ValueError.
    """
    return _backward(da_Tf, h_T2f, recompute, gelu=False, erf=False)


def geglu(h_T2f: Tensor, *, erf: bool = False) -> Tensor:
    """a[T, f] = gelu(h[:, :f]) * h[:, f:]; erf: the erf form instead of the tanh form.

    Raises TypeError, ValueError.
    """
    return _forward(h_T2f, gelu=True, erf=erf)


def geglu_grad(
    da_Tf: Tensor, h_T2f: Tensor, recompute: bool = False, *, erf: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(dh[T, 2f] in the memory of h, a[T, f] if `recompute` or None) of `geglu`.

    Raises TypeError, ValueError.
    """
    return _backward(da_Tf, h_T2f, recompute, gelu=True, erf=erf)


def _forward(h_T2f: Tensor, *, gelu: bool, erf: bool) -> Tensor:
    _check(h_T2f, None)
    tokens, columns = h_T2f.shape[0], h_T2f.shape[1] // 2
    a_Tf = h_T2f.new_empty(tokens, columns)
    if a_Tf.numel():
        use = choose("swiglu")
        _swiglu_kernel[(tokens, cdiv(columns, use["block"]))](
            h_T2f,
            a_Tf,
            columns,
            h_T2f.stride(0),
            a_Tf.stride(0),
            GELU=gelu,
            ERF=erf,
            **use["launch"],
        )
    return a_Tf


def _backward(
    da_Tf: Tensor, h_T2f: Tensor, recompute: bool, *, gelu: bool, erf: bool
) -> tuple[Tensor, Tensor | None]:
    da_Tf = rows_readable(da_Tf)
    _check(h_T2f, da_Tf)
    tokens, columns = h_T2f.shape[0], h_T2f.shape[1] // 2

    # An empty grid cannot be launched.
    a_Tf = h_T2f.new_empty(tokens, columns) if recompute else None
    if da_Tf.numel():
        use = choose("swiglu_grad")
        _swiglu_grad_kernel[(tokens, cdiv(columns, use["block"]))](
            da_Tf,
            h_T2f,
            a_Tf,
            columns,
            da_Tf.stride(0),
            h_T2f.stride(0),
            columns,
            RECOMPUTE=recompute,
            GELU=gelu,
            ERF=erf,
            **use["launch"],
        )
    increment_version(h_T2f)  # makes autograd refuse a second backward through the same graph
    return h_T2f, a_Tf
