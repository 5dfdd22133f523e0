"""GELU and SwiGLU in plain torch; shapes and types as in `plain.products`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.kernels.plain.blocks import blocks_and_room, low_precision_on_cpu, sum_dtype

_VECTOR = 32  # float32 elements that a loop of torch's takes at once, at most
# GELU's tanh form is z * sigmoid(z * (rate + cube * z^2))
_GELU_RATE = math.sqrt(8 / math.pi)
_GELU_CUBE = 0.044715 * _GELU_RATE
_LOG2_E = math.log2(math.e)
_GELU_EDGE = 9.8  # from here its slope is 0 or 1 within 1e-33, and e^-u is in float32's range


def gelu(h_Tf: Tensor) -> Tensor:
    """a = h / 2 * (1 + tanh(sqrt(2 / pi) * (h + 0.044715 h^3))), the tanh form of GPT-2."""
    return bias_gelu(h_Tf, None)


def gelu_grad(da_Tf: Tensor, h_Tf: Tensor, out: Tensor | None = None) -> Tensor:
    """dh[T, f] of `gelu`, written into `out` where given, which may be h."""
    return bias_gelu_grad(da_Tf, h_Tf, None, out=out)[0]


def bias_gelu(h_Tf: Tensor, bias_f: Tensor | None, *, erf: bool = False) -> Tensor:
    """a[T, f] = gelu(h + bias); erf: h / 2 * (1 + erf(h / sqrt(2))) instead of the tanh form."""
    a_Tf = h_Tf.new_empty(h_Tf.shape)  # torch's erf form writes nothing into other strides
    wide = h_Tf.dtype != sum_dtype(h_Tf.dtype)
    for block, z, _, room in _biased_blocks(h_Tf, bias_f, None, int(wide)):
        a = room[0] if wide else a_Tf[block]
        if erf:
            torch.ops.aten.gelu.out(z, approximate="none", out=a)
        else:
            _gelu_exponent(z, 1.0, out=a).sigmoid_().mul_(z)
        if wide:
            a_Tf[block].copy_(a)
    return a_Tf


def bias_gelu_grad(
    da_Tf: Tensor,
    h_Tf: Tensor,
    bias_f: Tensor | None,
    *,
    erf: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(dh[T, f], dbias[f] in the summing dtype) of `bias_gelu`; dh in `out`, which may be h.

    With g the gate of the tanh form and u = z (c + 0.044715 c z^2), c = sqrt(8 / pi), what it is
    the sigmoid of: dz = da * g * (1 + z * (1 - g) * u'), u' = c + 3 * 0.044715 c z^2, and 1 - g is
    e^-u g, which keeps its digits where g is near 1.
    """
    dh_Tf = torch.empty_like(h_Tf) if out is None else out
    dbias_f = None if bias_f is None else torch.zeros_like(bias_f, dtype=sum_dtype(h_Tf.dtype))
    for block, z, da, (gate, near, dz) in _biased_blocks(h_Tf, bias_f, da_Tf, 3):
        if erf:
            torch.ops.aten.gelu_backward.grad_input(da, z, approximate="none", grad_input=dz)
        else:
            torch.clamp(z, -_GELU_EDGE, _GELU_EDGE, out=near)
            _gelu_exponent(near, -_LOG2_E, out=dz).exp2_()
            torch.add(dz, 1, out=gate).reciprocal_()
            dz.mul_(gate).mul_(near)
            rate = near.new_full((), _GELU_RATE)
            torch.addcmul(rate, near, near, value=3 * _GELU_CUBE, out=near)
            dz.mul_(near).add_(1).mul_(gate).mul_(da)
        dh_Tf[block].copy_(dz)
        if dbias_f is not None:
            dbias_f += dz.sum(0)
    return dh_Tf, dbias_f


def _gelu_exponent(z_Tf: Tensor, scale: float, out: Tensor) -> Tensor:
    """scale * u, of which the gate of the tanh form is the sigmoid."""
    rate = z_Tf.new_full((), scale * _GELU_RATE)
    return torch.addcmul(rate, z_Tf, z_Tf, value=scale * _GELU_CUBE, out=out).mul_(z_Tf)


def _biased_blocks(
    h_Tf: Tensor, bias_f: Tensor | None, da_Tf: Tensor | None, count: int
) -> Iterator[tuple[slice, Tensor, Tensor, list[Tensor]]]:
    """Blocks of rows in the summing dtype: z = h + bias, da, and `count` of the kind to work in."""
    f, dtype = h_Tf.shape[1], sum_dtype(h_Tf.dtype)
    own_z = bias_f is not None or h_Tf.dtype != dtype
    own_da = da_Tf is not None and da_Tf.dtype != dtype
    bias_f = None if bias_f is None else bias_f.to(dtype)
    for block, room in blocks_and_room(h_Tf, [f] * (count + own_z + own_da), dtype):
        z = h_Tf[block]
        da = z if da_Tf is None else da_Tf[block]
        if own_z:
            z = room[count].copy_(z)
        if bias_f is not None:
            z.add_(bias_f)
        if own_da:
            da = room[-1].copy_(da)
        yield block, z, da, room[:count]


# --- SwiGLU --------------------------------------------------------------------------------------


class _Halves(NamedTuple):
    """Rows of gate | up, and room to work in.

    A pointwise operation over part of wider rows takes what is left of each after whole vectors an
    element at a time. So what takes an exponential reads F columns, f rounded up to whole vectors,
    into a buffer of that width.
    """

    gate_TF: Tensor  # the gate and a few columns of up
    gate_Tf: Tensor
    up_Tf: Tensor
    work_TF: Tensor
    work_Tf: Tensor  # the first f columns of it
    wide_Tf: Tensor | None  # for another tensor's copy where these are copies


def _halved(h_T2f: Tensor, work_TF: Tensor, wide_Tf: Tensor | None = None) -> _Halves:
    f, whole = h_T2f.shape[1] // 2, work_TF.shape[1]
    gate_Tf, up_Tf = h_T2f.chunk(2, dim=1)
    if whole == f:
        return _Halves(gate_Tf, gate_Tf, up_Tf, work_TF, work_TF, wide_Tf)
    return _Halves(h_T2f[:, :whole], gate_Tf, up_Tf, work_TF, work_TF[:, :f], wide_Tf)


def _halves(h_T2f: Tensor) -> Iterator[tuple[slice, _Halves]]:
    """Blocks of rows of h; 16-bit ones on CPU are float32 copies, which may be written over."""
    f = h_T2f.shape[1] // 2
    whole = min(2 * f, -(-f // _VECTOR) * _VECTOR)
    if not low_precision_on_cpu(h_T2f):
        for block, (work_TF,) in blocks_and_room(h_T2f, [whole], h_T2f.dtype):
            yield block, _halved(h_T2f[block], work_TF)
        return
    halved: tuple[list[Tensor], _Halves] | None = None
    for block, room in blocks_and_room(h_T2f, [2 * f, whole, f], torch.float32):
        if halved is None or halved[0] is not room:
            halved = room, _halved(*room)
        room[0].copy_(h_T2f[block])
        yield block, halved[1]


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


def swiglu_grad(da_Tf: Tensor, h_T2f: Tensor, out: Tensor | None = None) -> Tensor:
    """dh[T, 2f] of `swiglu`, written into `out` where given, which may be h.

    With s = sigmoid(gate): dup = da * gate * s, dgate = da * up * s * (1 + gate * (1 - s)).
    """
    dh_T2f = torch.empty_like(h_T2f) if out is None else out
    dgate_Tf, dup_Tf = dh_T2f.chunk(2, dim=-1)
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
            # as dgate = up * (da * s * (1 - s) * gate + da * s) = up * lerp(dup, da, s)
            dgate.copy_(torch.lerp(dup_wide, da, h.work_Tf, out=da).mul_(h.up_Tf))
    return dh_T2f
