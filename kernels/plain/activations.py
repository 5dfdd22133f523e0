"""GELU, squared ReLU and gates (SwiGLU, GeGLU) in plain torch; shapes and types as in
`plain.products`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.kernels.plain.blocks import blocks_and_buffers, low_precision_on_cpu, sum_dtype

_VECTOR = 32  # the most float32 elements that a CPU loop of torch takes at once
# GELU's tanh form is z * sigmoid(z * (rate + cube * z^2))
_GELU_RATE = math.sqrt(8 / math.pi)
_GELU_CUBE = 0.044715 * _GELU_RATE
_LOG2_E = math.log2(math.e)
_GELU_EDGE = 9.8  # beyond it the slope is 0 or 1 within 1e-33; up to it e^-u fits float32


def gelu(h_Tf: Tensor, bias_f: Tensor | None = None, *, erf: bool = False) -> Tensor:
    """a[T, f] = z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3))), z = h + bias.

    erf: z / 2 * (1 + erf(z / sqrt(2))) instead of the tanh form of GPT-2.
    """
    a_Tf = h_Tf.new_empty(h_Tf.shape)  # contiguous: torch's erf form ignores other strides
    wide = h_Tf.dtype != sum_dtype(h_Tf.dtype)
    for block, z, _, buffers in _biased_blocks(h_Tf, bias_f, None, 1 if wide else 0):
        a = buffers[0] if wide else a_Tf[block]
        if erf:
            torch.ops.aten.gelu.out(z, approximate="none", out=a)
        else:
            _gelu_exponent(z, 1.0, out=a).sigmoid_().mul_(z)
        if wide:
            a_Tf[block].copy_(a)
    return a_Tf


def gelu_grad(
    da_Tf: Tensor,
    h_Tf: Tensor,
    recompute: bool = False,
    bias_f: Tensor | None = None,
    *,
    erf: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dh[T, f] in the memory of h, a[T, f] if `recompute`, dbias[f] in the summing dtype).

    The tanh form is z * g with the gate g = sigmoid(u), u = z (c + 0.044715 c z^2) and
    c = sqrt(8 / pi). So dz = da * g * (1 + z * (1 - g) * u') with u' = c + 3 * 0.044715 c z^2.
    1 - g is computed as e^-u g, which is precise where g is near 1.
    """
    a_Tf = gelu(h_Tf, bias_f, erf=erf) if recompute else None
    dbias_f = None if bias_f is None else torch.zeros_like(bias_f, dtype=sum_dtype(h_Tf.dtype))
    for block, z, da, (gate, near, dz) in _biased_blocks(h_Tf, bias_f, da_Tf, 3):
        if erf:
            torch.ops.aten.gelu_backward.grad_input(da, z, approximate="none", grad_input=dz)
        else:
            # e^-u = 2^(-u log2 e) would overflow for z far below 0, hence the clamp; at the edge
            # the slope is at its limit within 1e-33.
            torch.clamp(z, -_GELU_EDGE, _GELU_EDGE, out=near)
            _gelu_exponent(near, -_LOG2_E, out=dz).exp2_()
            torch.add(dz, 1, out=gate).reciprocal_()

            # dz holds e^-u here, so times the gate it is 1 - g. `near` holds z and then u': three
            # buffers are enough for all of it.
            dz.mul_(gate).mul_(near)
            rate = near.new_full((), _GELU_RATE)
            torch.addcmul(rate, near, near, value=3 * _GELU_CUBE, out=near)
            dz.mul_(near).add_(1).mul_(gate).mul_(da)
        h_Tf[block].copy_(dz)
        if dbias_f is not None:
            dbias_f += dz.sum(0)
    return h_Tf, a_Tf, dbias_f


def _gelu_exponent(z_Tf: Tensor, scale: float, out: Tensor) -> Tensor:
    """scale * u, where sigmoid(u) is the gate of the tanh form."""
    rate = z_Tf.new_full((), scale * _GELU_RATE)
    return torch.addcmul(rate, z_Tf, z_Tf, value=scale * _GELU_CUBE, out=out).mul_(z_Tf)


def _biased_blocks(
    h_Tf: Tensor, bias_f: Tensor | None, da_Tf: Tensor | None, count: int
) -> Iterator[tuple[slice, Tensor, Tensor, list[Tensor]]]:
    """(rows, z, da, buffers) of blocks of rows in the summing dtype, with z = h + bias.

    buffers: `count` tensors of z's shape, reused by the next block. Without da_Tf, da is z.
    """
    f, dtype = h_Tf.shape[1], sum_dtype(h_Tf.dtype)
    own_z = bias_f is not None or h_Tf.dtype != dtype
    own_da = da_Tf is not None and da_Tf.dtype != dtype
    bias_f = None if bias_f is None else bias_f.to(dtype)
    copies = (1 if own_z else 0) + (1 if own_da else 0)
    for block, buffers in blocks_and_buffers(h_Tf, [f] * (count + copies), dtype):
        z = h_Tf[block]
        da = z if da_Tf is None else da_Tf[block]
        if own_z:
            z = buffers[count].copy_(z)
        if bias_f is not None:
            z.add_(bias_f)
        if own_da:
            da = buffers[-1].copy_(da)
        yield block, z, da, buffers[:count]


# --- squared ReLU --------------------------------------------------------------------------------


def relu2(h_Tf: Tensor) -> Tensor:
    """a[T, f] = max(h, 0)^2, rounded once."""
    return torch.relu(h_Tf).square_()


def relu2_grad(
    da_Tf: Tensor, h_Tf: Tensor, recompute: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(dh[T, f] in the memory of h, a[T, f] if `recompute` or None) of `relu2`: 2 da max(h, 0)."""
    a_Tf = relu2(h_Tf) if recompute else None
    return h_Tf.relu_().mul_(2).mul_(da_Tf), a_Tf


# --- SwiGLU --------------------------------------------------------------------------------------


class _Halves(NamedTuple):
    """Rows of gate | up, and buffers to work in.

    A pointwise operation over a part of wider rows computes the end of each row, what does not fill
    a vector, element by element. An exponential is slow that way, so it is taken of F columns,
    f rounded up to whole vectors, into a buffer of that width.
    """

    gate_TF: Tensor  # the gate and a few columns of up
    gate_Tf: Tensor
    up_Tf: Tensor
    work_TF: Tensor
    work_Tf: Tensor  # the first f columns of work_TF
    wide_Tf: Tensor | None  # a buffer for da in float32, if gate and up are float32 copies


def _halved(h_T2f: Tensor, work_TF: Tensor, wide_Tf: Tensor | None = None) -> _Halves:
    """The halves of rows, with buffers."""
    f, whole = h_T2f.shape[1] // 2, work_TF.shape[1]
    gate_Tf, up_Tf = h_T2f.chunk(2, dim=1)
    if whole == f:
        return _Halves(gate_Tf, gate_Tf, up_Tf, work_TF, work_TF, wide_Tf)
    return _Halves(h_T2f[:, :whole], gate_Tf, up_Tf, work_TF, work_TF[:, :f], wide_Tf)


def _halves(h_T2f: Tensor) -> Iterator[tuple[slice, _Halves]]:
    """Blocks of rows of h. 16-bit rows on CPU come as float32 copies, which may be overwritten."""
    f = h_T2f.shape[1] // 2
    whole = min(2 * f, -(-f // _VECTOR) * _VECTOR)
    if not low_precision_on_cpu(h_T2f):
        for block, (work_TF,) in blocks_and_buffers(h_T2f, [whole], h_T2f.dtype):
            yield block, _halved(h_T2f[block], work_TF)
        return
    for block, (h, work_TF, wide_Tf) in blocks_and_buffers(h_T2f, [2 * f, whole, f], torch.float32):
        h.copy_(h_T2f[block])
        yield block, _halved(h, work_TF, wide_Tf)


def swiglu(h_T2f: Tensor) -> Tensor:
    """a[T, f] = silu(h[:, :f]) * h[:, f:]; the first half is the gate."""
    a_Tf = h_T2f.new_empty(h_T2f.shape[0], h_T2f.shape[1] // 2)
    for block, h in _halves(h_T2f):
        torch.ops.aten.silu.out(h.gate_TF, out=h.work_TF)
        if h.wide_Tf is None:
            torch.mul(h.work_Tf, h.up_Tf, out=a_Tf[block])
        else:
            a_Tf[block].copy_(h.work_Tf.mul_(h.up_Tf))
    return a_Tf


def swiglu_grad(
    da_Tf: Tensor, h_T2f: Tensor, recompute: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(dh[T, 2f] in the memory of h, a[T, f] if `recompute` or None) of `swiglu`.

    With s = sigmoid(gate): dup = da * gate * s, dgate = da * up * s * (1 + gate * (1 - s)).
    """
    a_Tf = swiglu(h_T2f) if recompute else None
    dgate_Tf, dup_Tf = h_T2f.chunk(2, dim=-1)
    for block, h in _halves(h_T2f):
        da, dgate, dup = da_Tf[block], dgate_Tf[block], dup_Tf[block]
        if h.wide_Tf is None:
            da = da.to(h.work_TF.dtype)
            torch.ops.aten.silu.out(h.gate_TF, out=h.work_TF)
            torch.mul(da, h.up_Tf, out=dup)
            torch.ops.aten.silu_backward.grad_input(dup, h.gate_Tf, grad_input=dgate)
            torch.mul(h.work_Tf, da, out=dup)
        else:
            torch.sigmoid(h.gate_TF, out=h.work_TF)
            da = h.wide_Tf.copy_(da)
            dup_wide = h.gate_Tf.mul_(h.work_Tf).mul_(da)
            dup.copy_(dup_wide)
            # dgate = up * (da * s * (1 - s) * gate + da * s) = up * lerp(dup, da, s)
            dgate.copy_(torch.lerp(dup_wide, da, h.work_Tf, out=da).mul_(h.up_Tf))
    return h_T2f, a_Tf


# --- GeGLU ---------------------------------------------------------------------------------------


def geglu(h_T2f: Tensor, *, erf: bool = False) -> Tensor:
    """a[T, f] = gelu(h[:, :f]) * h[:, f:]; the first half is the gate. erf: as in `gelu`."""
    a_Tf = h_T2f.new_empty(h_T2f.shape[0], h_T2f.shape[1] // 2)
    for block, gate, up, _ in _gate_blocks(h_T2f, 0):
        a_Tf[block] = gelu(gate, erf=erf).mul_(up)
    return a_Tf


def geglu_grad(
    da_Tf: Tensor, h_T2f: Tensor, recompute: bool = False, *, erf: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(dh[T, 2f] in the memory of h, a[T, f] if `recompute` or None) of `geglu`.

    dup = da * gelu(gate), dgate = da * up * gelu'(gate).
    """
    a_Tf = h_T2f.new_empty(da_Tf.shape) if recompute else None
    dgate_Tf, dup_Tf = h_T2f.chunk(2, dim=-1)
    for block, gate, up, (work,) in _gate_blocks(h_T2f, 1):
        gelu_Tf, da = gelu(gate, erf=erf), da_Tf[block]
        if a_Tf is not None:
            a_Tf[block] = torch.mul(gelu_Tf, up, out=work)
        torch.mul(da, up, out=work)
        dup_Tf[block] = gelu_Tf.mul_(da)
        dgate_Tf[block] = gelu_grad(work, gate, erf=erf)[0]
    return h_T2f, a_Tf


def _gate_blocks(h_T2f: Tensor, count: int) -> Iterator[tuple[slice, Tensor, Tensor, list[Tensor]]]:
    """(rows, gate, up, buffers) of blocks of rows: copies in the summing dtype, to write over.

    buffers: `count` tensors of the gate's shape.
    """
    f, dtype = h_T2f.shape[1] // 2, sum_dtype(h_T2f.dtype)
    for block, (gate, up, *buffers) in blocks_and_buffers(h_T2f, [f] * (2 + count), dtype):
        yield block, gate.copy_(h_T2f[block, :f]), up.copy_(h_T2f[block, f:]), buffers
