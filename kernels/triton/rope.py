"""Rotary position embedding in Triton, in place, and its inverse (which is its gradient).

The first R elements of each head are pairs (x[i], x[i + R/2]) that are rotated by the angle of
their token's position (RoFormer, half-split form); elements from R on are left as they are. The
caller makes the tables, so any scaling of the angles works.
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
    rows_readable,
    vector,
)
from megalite.kernels.triton.tables import choose


@triton.jit
def _rope_kernel(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    length,
    num_heads,
    members,
    x_stride,
    group_stride,
    head_stride,
    out_stride,
    out_group_stride,
    out_head_stride,
    sign,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = token % length
    pair = tl.arange(0, BLOCK)
    known = pair < HALF
    if POSITIONS:
        position = tl.load(position_ptr + token).to(tl.int64)
        known = known & (position >= 0) & (position < length)

    # NaN for positions outside of the tables: the host cannot check them without waiting
    cos = tl.load(cos_ptr + position * HALF + pair, mask=known, other=float("nan"))[None, :]
    sin = tl.load(sin_ptr + position * HALF + pair, mask=known, other=float("nan"))[None, :] * sign

    # heads of a token are numbered across groups, which have a stride of their own
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (head < num_heads)[:, None] & (pair < HALF)[None, :]
    group, member = (head // members).to(tl.int64), (head % members).to(tl.int64)
    first = x_ptr + token * x_stride + (group * group_stride + member * head_stride)[:, None]
    first = first + pair[None, :]
    x1 = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(first + HALF, mask=inside, other=0.0).to(tl.float32)

    head_at = group * out_group_stride + member * out_head_stride
    out = out_ptr + token * out_stride + head_at[:, None] + pair[None, :]
    tl.store(out, (x1 * cos - x2 * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out + HALF, (x2 * cos + x1 * sin).to(out_ptr.dtype.element_ty), mask=inside)


def rotate_heads_(
    x_TkgH: Tensor,
    cos_sh: Tensor,
    sin_sh: Tensor,
    position_T: Tensor | None = None,
    *,
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate every head of x[T, K, G, H] by its token's position, into `out` or in place.

    x is any view with a contiguous last dimension, such as queries and keys of packed heads; out
    has its shape and shares no memory with it. Returns out, or x. cos_sh, sin_sh: float32
    [s, R/2], R <= H. Token t has position position_T[t], or t mod s; a position outside 0 ... s - 1
    gives NaN. inverse: rotate back, which is the gradient. Raises TypeError, ValueError.
    """
    # Values of positions are not checked, as that would wait for the device.
    tokens, groups, members, head_dim = x_TkgH.shape
    length, half = cos_sh.shape
    check_float("rope", x=x_TkgH, out=out)
    check_last_contiguous("rope", x=x_TkgH, out=out)
    check_shape("rope", (length, half), sin=sin_sh)
    check_shape("rope", (tokens,), position=position_T)
    check_shape("rope", tuple(x_TkgH.shape), out=out)
    if 2 * half > head_dim:
        raise ValueError(f"rope: tables turn {2 * half} elements, a head has {head_dim}")
    if position_T is not None and position_T.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"rope: position is {position_T.dtype}, expected int32 or int64")
    if tokens and not length:
        raise ValueError("rope: tables have no positions; make them as long as the sequence")

    # The kernel touches rotated elements alone.
    if out is not None and 2 * half < head_dim:
        out[..., 2 * half :] = x_TkgH[..., 2 * half :]
    rotated = x_TkgH if out is None else out

    block, use = next_power_of_2(half), choose("rope")
    heads = groups * members
    heads_per_program = min(next_power_of_2(heads), max(1, use["pairs"] // block))
    if x_TkgH.numel() and half:
        _rope_kernel[(tokens, cdiv(heads, heads_per_program))](
            x_TkgH,
            rotated,
            cos_sh.contiguous(),
            sin_sh.contiguous(),
            vector(position_T),
            length,
            heads,
            members,
            *x_TkgH.stride()[:3],
            *rotated.stride()[:3],
            -1.0 if inverse else 1.0,
            HALF=half,
            HEADS=heads_per_program,
            BLOCK=block,
            POSITIONS=position_T is not None,
            **use["launch"],
        )
    return rotated


def rotate_heads(
    x_TNH: Tensor,
    cos_sh: Tensor,
    sin_sh: Tensor,
    position_T: Tensor | None = None,
    *,
    inverse: bool = False,
) -> Tensor:
    """x[T, N, H] with every head rotated by its token's position, or back; a new tensor."""
    out = torch.empty_like(x_TNH, memory_format=torch.contiguous_format)
    # the kernel takes heads in groups; here all are one group
    x_T1NH, out_T1NH = rows_readable(x_TNH).unsqueeze(1), out.unsqueeze(1)
    rotate_heads_(x_T1NH, cos_sh, sin_sh, position_T, inverse=inverse, out=out_T1NH)
    return out


def rotate(qkv_TkgH: Tensor, cos_sh: Tensor, sin_sh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of packed heads, q and k rotated by their position: `plain.rope.rotate`."""
    q, k, v = _parts(qkv_TkgH)
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    rotate_heads_(q, cos_sh, sin_sh, out=q_out)
    rotate_heads_(k, cos_sh, sin_sh, out=k_out)
    return q_out, k_out, v


def rotate_grad_(
    dqkv_TkgH: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, cos_sh: Tensor, sin_sh: Tensor
) -> None:
    """Write the gradient of `rotate` into dqkv."""
    q, k, v = _parts(dqkv_TkgH)
    for dx, out in ((dq, q), (dk, k)):
        rotate_heads_(rows_readable(dx), cos_sh, sin_sh, inverse=True, out=out)
    v.copy_(dv)


def _parts(qkv_TkgH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the query heads, the key head and the value head of each group."""
    return qkv_TkgH[:, :, :-2], qkv_TkgH[:, :, -2:-1], qkv_TkgH[:, :, -1:]
