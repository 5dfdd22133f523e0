"""Rotary position embedding in Triton, and its inverse (which is its gradient).

The first R elements of each head are pairs (x[i], x[i + R/2]) that are rotated by the angle of
their token's position (RoFormer, half-split form); elements from R on, and values, are copied. The
caller makes the tables, so any scaling of the angles works.

Heads are packed, [T, K, g + 2, H], on one side of the kernel, and apart on the other: queries, keys
and values are rows of T tokens each, with the heads of a token side by side.
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
    check_same,
    check_shape,
    next_power_of_2,
    once_per_form,
    rows_readable,
    vector,
)
from megalite.kernels.triton.attention_tiles import flat
from megalite.kernels.triton.launch import prepared
from megalite.kernels.triton.tables import choose


@prepared
@triton.jit
def _rope_kernel(
    packed_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    length,
    groups,
    queries,
    q_blocks,
    k_blocks,
    packed_stride,
    group_stride,
    head_stride,
    q_stride,
    k_stride,
    v_stride,
    sign,
    H: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    POSITIONS: tl.constexpr,
    PACK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)

    # a program has heads of one kind: some of the queries, keys or values of all groups
    block = tl.program_id(1)
    is_q = block < q_blocks
    is_k = block < q_blocks + k_blocks
    row = tl.where(is_k, k_ptr + token * k_stride, v_ptr + token * v_stride)
    row = tl.where(is_q, q_ptr + token * q_stride, row)
    block = tl.where(is_q, block, (block - q_blocks) % k_blocks)
    each = tl.where(is_q, queries, 1)
    head = block * HEADS + tl.arange(0, HEADS)
    exists = (head < groups * each)[:, None]
    group, member = (head // each).to(tl.int64), (head % each).to(tl.int64)
    member += tl.where(is_q, 0, tl.where(is_k, queries, queries + 1))
    packed = packed_ptr + token * packed_stride
    packed = packed + (group * group_stride + member * head_stride)[:, None]
    apart = row + (head * H)[:, None]
    if PACK:
        source = apart
        out = packed
    else:
        source = packed
        out = apart

    if HALF > 0:
        position = token % length
        pair = tl.arange(0, BLOCK)
        known = pair < HALF
        if POSITIONS:
            position = tl.load(position_ptr + token).to(tl.int64)
            known = known & (position >= 0) & (position < length)

        # NaN for positions outside of the tables: the host cannot check them without waiting
        at = position * HALF + pair
        cos = tl.load(cos_ptr + at, mask=known, other=float("nan"))[None, :]
        sin = tl.load(sin_ptr + at, mask=known, other=float("nan"))[None, :] * sign
        inside = exists & (pair < HALF)[None, :]
        first = pair[None, :]
        x1 = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(source + first + HALF, mask=inside, other=0.0).to(tl.float32)
        y1 = tl.where(is_k, x1 * cos - x2 * sin, x1)
        y2 = tl.where(is_k, x2 * cos + x1 * sin, x2)
        tl.store(out + first, y1.to(out.dtype.element_ty), mask=inside)
        tl.store(out + first + HALF, y2.to(out.dtype.element_ty), mask=inside)

    if REST > 0:
        column = 2 * HALF + tl.arange(0, REST)[None, :]
        inside = exists & (column < H)
        tl.store(out + column, tl.load(source + column, mask=inside, other=0.0), mask=inside)


@once_per_form
def _check(packed: Tensor, cos: Tensor, sin: Tensor, position: Tensor | None) -> None:
    tokens, _, _, head_dim = packed.shape
    length, half = cos.shape
    check_float("rope", x=packed)
    check_last_contiguous("rope", x=packed)
    check_shape("rope", (length, half), sin=sin)
    check_shape("rope", (tokens,), position=position)
    if 2 * half > head_dim:
        raise ValueError(f"rope: tables turn {2 * half} elements, a head has {head_dim}")
    if position is not None and position.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"rope: position is {position.dtype}, expected int32 or int64")
    if tokens and not length:
        raise ValueError("rope: tables have no positions; make them as long as the sequence")


def _launch(
    packed_TkgH: Tensor,
    apart: tuple[Tensor, ...],
    cos_sh: Tensor,
    sin_sh: Tensor,
    position_T: Tensor | None = None,
    *,
    inverse: bool = False,
    pack: bool = False,
) -> None:
    """Rotate between packed heads and (q[T, K * g * H], k[T, K * H], v[T, K * H]) apart.

    Without v, or without k and v, groups have no such heads to rotate or copy. pack: from apart to
    packed. Raises TypeError, ValueError.
    """
    _check(packed_TkgH, cos_sh, sin_sh, position_T)
    tokens, groups, _, head_dim = packed_TkgH.shape
    length, half = cos_sh.shape

    # What is not there is never selected.
    q, k, v = (*apart, *[apart[0]] * (3 - len(apart)))
    queries = q.shape[1] // (groups * head_dim)
    block, rest, use = next_power_of_2(half), head_dim - 2 * half, choose("rope")
    width = max(block, next_power_of_2(rest))
    heads = min(next_power_of_2(groups * queries), max(1, use["pairs"] // width))
    q_blocks, k_blocks = cdiv(groups * queries, heads), cdiv(groups, heads)
    if packed_TkgH.numel():
        _rope_kernel[(tokens, q_blocks + k_blocks * (len(apart) - 1))](
            packed_TkgH,
            q,
            k,
            v,
            cos_sh.contiguous(),
            sin_sh.contiguous(),
            vector(position_T),
            length,
            groups,
            queries,
            q_blocks,
            k_blocks,
            *packed_TkgH.stride()[:3],
            q.stride(0),
            k.stride(0),
            v.stride(0),
            -1.0 if inverse else 1.0,
            H=head_dim,
            HALF=half,
            HEADS=heads,
            BLOCK=block,
            REST=next_power_of_2(rest) if rest else 0,
            POSITIONS=position_T is not None,
            PACK=pack,
            **use["launch"],
        )


def rotate_heads(
    x_TNH: Tensor,
    cos_sh: Tensor,
    sin_sh: Tensor,
    position_T: Tensor | None = None,
    *,
    inverse: bool = False,
) -> Tensor:
    """x[T, N, H] with every head rotated by its token's position, or back; a new tensor.

    cos_sh, sin_sh: float32 [s, R/2], R <= H. Token t has position position_T[t], or t mod s; a
    position outside 0 ... s - 1 gives NaN. Raises TypeError, ValueError.
    """
    # Values of positions are not checked, as that would wait for the device.
    out = torch.empty_like(x_TNH, memory_format=torch.contiguous_format)
    # the kernel takes heads in groups; here all are queries of one
    x_T1NH = rows_readable(x_TNH).unsqueeze(1)
    _launch(x_T1NH, (out.flatten(1),), cos_sh, sin_sh, position_T, inverse=inverse)
    return out


def rotate(
    qkv_TkgH: Tensor, cos_sh: Tensor, sin_sh: Tensor, copy_values: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of packed heads, q and k rotated by their position: `plain.rope.rotate`.

    What is new lies in one tensor. Raises TypeError, ValueError.
    """
    tokens, groups, packed, head_dim = qkv_TkgH.shape
    heads = [packed - 2, 1, 1] if copy_values else [packed - 2, 1]
    new = qkv_TkgH.new_empty(tokens, groups * sum(heads) * head_dim)
    apart = new.split([groups * n * head_dim for n in heads], 1)
    _launch(qkv_TkgH, apart, cos_sh, sin_sh)
    q, k, *v = (x.view(tokens, groups, n, head_dim) for x, n in zip(apart, heads, strict=True))
    return q, k, v[0] if v else qkv_TkgH[:, :, -1:]


def rotate_grad_(
    dqkv_TkgH: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, cos_sh: Tensor, sin_sh: Tensor
) -> None:
    """Write the gradient of `rotate` into dqkv. Raises TypeError, ValueError."""
    check_same("rope", "types", dqkv=dqkv_TkgH.dtype, dq=dq.dtype, dk=dk.dtype, dv=dv.dtype)
    apart = tuple(flat(x.flatten(1, 2)) for x in (dq, dk, dv))
    _launch(dqkv_TkgH, apart, cos_sh, sin_sh, inverse=True, pack=True)
