"""Rotary position embedding in Triton, in place, and its inverse (which is its gradient).

The first R elements of each rotated head are pairs (x[i], x[i + R/2]) that turn by the angle of
their token's position (RoFormer, half-split form); elements from R on are left alone. Tables are
computed elsewhere, so every scaling of the angles works.
"""

from __future__ import annotations

import triton
import triton.language as tl
from megalite.kernels.triton_common import (
    OPTIONS,
    cdiv,
    check_float,
    check_last_contiguous,
    check_shape,
    next_power_of_2,
)
from torch import Tensor

_PAIRS_PER_PROGRAM = 2048


@triton.jit
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    length,
    num_heads,
    members,
    x_stride,
    group_stride,
    head_stride,
    sign,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = token % length
    if POSITIONS:
        position = tl.load(position_ptr + token).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + pair, mask=pair < HALF, other=0.0)[None, :] * sign
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (head < num_heads)[:, None] & (pair < HALF)[None, :]
    group, member = (head // members).to(tl.int64), (head % members).to(tl.int64)
    first = x_ptr + token * x_stride + (group * group_stride + member * head_stride)[:, None]
    first = first + pair[None, :]
    x1 = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(first + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, (x1 * cos - x2 * sin).to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(first + HALF, (x2 * cos + x1 * sin).to(x_ptr.dtype.element_ty), mask=inside)


def rope_(
    x_TkgH: Tensor,
    cos_sh: Tensor,
    sin_sh: Tensor,
    position_T: Tensor | None = None,
    *,
    inverse: bool = False,
) -> Tensor:
    """Rotate every head of x[T, K, G, H] in place by its token's position; returns x.

    x is any view with a contiguous last dimension, such as queries and keys of packed heads.
    cos_sh, sin_sh: float32 [s, R/2], R <= H. Token t has position position_T[t] (an integer below
    s), or t mod s. inverse: rotate back, which is the gradient. Raises TypeError, ValueError.
    """
    tokens, groups, members, head_dim = x_TkgH.shape
    length, half = cos_sh.shape
    check_float("rope", x=x_TkgH)
    check_last_contiguous("rope", x=x_TkgH)
    check_shape("rope", (length, half), sin=sin_sh)
    check_shape("rope", (tokens,), position=position_T)
    if 2 * half > head_dim:
        raise ValueError(f"rope: tables turn {2 * half} elements, a head has {head_dim}")
    if not (cos_sh.is_contiguous() and sin_sh.is_contiguous()):
        raise ValueError("rope: cos and sin must be contiguous; pass .contiguous()")
    block = next_power_of_2(half)
    heads = groups * members
    heads_per_program = min(next_power_of_2(heads), max(1, _PAIRS_PER_PROGRAM // block))
    if x_TkgH.numel() and half:
        _rope_kernel[(tokens, cdiv(heads, heads_per_program))](
            x_TkgH,
            cos_sh,
            sin_sh,
            position_T,
            length,
            heads,
            members,
            x_TkgH.stride(0),
            x_TkgH.stride(1),
            x_TkgH.stride(2),
            -1.0 if inverse else 1.0,
            HALF=half,
            HEADS=heads_per_program,
            BLOCK=block,
            POSITIONS=position_T is not None,
            num_warps=4,
            **OPTIONS,
        )
    return x_TkgH
