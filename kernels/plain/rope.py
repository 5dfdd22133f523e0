"""Rotary position embedding in plain torch; shapes and types as in `plain.products`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.kernels.plain.blocks import block_elements, sum_dtype


class RopeScaling(NamedTuple):
    """Llama 3's frequencies for contexts longer than the model was first trained on.

    A pair that turns more than `high_freq_factor` times in `original_max_position` tokens stays as
    it is, one that turns less than `low_freq_factor` times is slowed by `factor`; in between the
    two rates are blended linearly in the number of turns.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


def rope_tables(
    length_tokens: int,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, R/2], of position * theta^(-2i/R), computed in float64.

    rotary_dim R: elements of each head that turn, an even number; 0 gives tables without columns.
    Raises ValueError.
    """
    if rotary_dim < 0 or rotary_dim % 2 or length_tokens < 0 or not 0 < theta < math.inf:
        raise ValueError(
            f"rope: rotary_dim={rotary_dim}, length={length_tokens}, theta={theta}; expected an "
            "even number of elements, 0 or more positions and a positive base"
        )
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(1, rotary_dim)
    rate = theta**-exponent
    if scaling is not None:
        turns = scaling.original_max_position * rate / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        rate = rate * (kept + (1 - kept) / scaling.factor)
    position = torch.arange(length_tokens, dtype=torch.float64)
    angle = torch.outer(position, rate)
    dtype = sum_dtype(dtype)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def _turn_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    """out = x turned by sign * angle; the two halves of the last dim are a complex pair.

    cos holds the cosines of both halves, sin those of one, both in out's type, which x is widened
    to. Elements beyond them are copied.
    """
    half, turned = sin.shape[-1], 2 * sin.shape[-1]
    x = x.to(out.dtype)
    if turned < x.shape[-1]:
        out[..., turned:] = x[..., turned:]
    torch.mul(x[..., :turned], cos, out=out[..., :turned])
    out[..., :half].addcmul_(x[..., half:turned], sin, value=-sign)
    out[..., half:turned].addcmul_(x[..., :half], sin, value=sign)


def turn(
    x_TNH: Tensor,
    cos_sh: Tensor,
    sin_sh: Tensor,
    position_T: Tensor | None = None,
    *,
    inverse: bool = False,
) -> Tensor:
    """x[T, N, H] with every head rotated by its token's position: position_T[t], or t mod s."""
    if position_T is None:
        position_T = torch.arange(len(x_TNH), device=x_TNH.device) % len(cos_sh)
    cos, sin = (table[position_T].unsqueeze(1) for table in (cos_sh, sin_sh))
    out = torch.empty(x_TNH.shape, dtype=cos.dtype, device=cos.device)
    _turn_into(out, x_TNH, torch.cat([cos, cos], -1), sin, -1.0 if inverse else 1.0)
    return out.to(x_TNH.dtype)


def _sequence_blocks(
    x_BskgH: Tensor, cos_sh: Tensor, sin_sh: Tensor
) -> Iterator[tuple[tuple[slice, slice], Tensor, Tensor]]:
    """(where in the first two dims, cosines, sines) of blocks of about as many elements as above.

    The cosines are repeated for all heads of a group, for long inner loops.
    """
    sequences, length, _, heads, _ = x_BskgH.shape
    each = max(1, math.prod(x_BskgH.shape[2:]))
    elements = block_elements(x_BskgH)
    rows = max(1, elements // each)
    batch = max(1, rows // length)
    for start in range(0, length, rows):
        place = slice(start, start + rows)
        cos_sh11 = cos_sh[place, None, None]
        cos = torch.cat([cos_sh11, cos_sh11], -1).expand(-1, -1, heads, -1).contiguous()
        for first in range(0, sequences, batch):
            yield (slice(first, first + batch), place), cos, sin_sh[place, None, None]


def rotate(qkv_TkgH: Tensor, cos_sh: Tensor, sin_sh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed heads and rotate queries and keys by their position (RoFormer, half-split form).

    qkv_TkgH: [T, K, N/K + 2, H]; a group holds its query heads, then its key, then its value.
    cos_sh, sin_sh: [s, R/2] with T a multiple of s; token t has position t mod s. The first R
    elements of each head turn, the others are copied.
    Returns q[T, K, N/K, H], k[T, K, 1, H] (new) and v[T, K, 1, H] (a view).
    """
    tokens, groups, packed, head_dim = qkv_TkgH.shape
    queries = packed - 2
    q = qkv_TkgH.new_empty(tokens, groups, queries, head_dim)
    k = qkv_TkgH.new_empty(tokens, groups, 1, head_dim)
    qkv, q_B, k_B = (x.view(-1, len(cos_sh), *x.shape[1:]) for x in (qkv_TkgH, q, k))
    heads = qkv[:, :, :, : queries + 1]
    for at, cos, sin in _sequence_blocks(heads, cos_sh, sin_sh):
        turned = torch.empty(heads[at].shape, dtype=cos.dtype, device=cos.device)
        _turn_into(turned, heads[at], cos, sin, 1.0)
        q_B[at] = turned[:, :, :, :queries]
        k_B[at] = turned[:, :, :, queries:]
    return q, k, qkv_TkgH[:, :, queries + 1 :]


def rotate_grad_(
    dqkv_TkgH: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, cos_sh: Tensor, sin_sh: Tensor
) -> None:
    """Write the gradient of `rotate` into dqkv[T, K, N/K + 2, H]: rotate back by the same angle."""
    queries = dqkv_TkgH.shape[2] - 2
    dqkv = dqkv_TkgH.view(-1, len(cos_sh), *dqkv_TkgH.shape[1:])
    dq, dk = (x.reshape(-1, len(cos_sh), *x.shape[1:]) for x in (dq, dk))
    heads = dqkv[:, :, :, : queries + 1]
    for at, cos, sin in _sequence_blocks(heads, cos_sh, sin_sh):
        wide = torch.empty(heads[at].shape, dtype=cos.dtype, device=cos.device)
        wide[:, :, :, :queries] = dq[at]
        wide[:, :, :, queries:] = dk[at]
        turned = heads[at] if heads.dtype == wide.dtype else torch.empty_like(wide)
        _turn_into(turned, wide, cos, sin, -1.0)
        if turned.dtype != heads.dtype:
            heads[at] = turned
    dqkv_TkgH[:, :, queries + 1 :].copy_(dv)
