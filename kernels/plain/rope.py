"""Rotary position embedding in plain torch; shapes and types as in `plain.products`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.kernels.plain.blocks import block_elements, sum_dtype


class RopeScaling(Protocol):
    """Frequencies for contexts longer than the model was first trained on.

    A pair keeps a share of its frequency, the rest of it is divided by `factor`; `gain` multiplies
    rotated queries and keys.
    """

    @property
    def factor(self) -> float: ...
    @property
    def gain(self) -> float: ...
    def kept(self, rate_P: Tensor, theta: float) -> Tensor:
        """The share that each pair keeps, 0 to 1. rate: radians a token, of base theta."""
        ...


class LinearScaling(NamedTuple):
    """All frequencies divided by `factor`, as if positions were (arXiv 2306.15595)."""

    factor: float
    gain: float = 1.0

    def kept(self, rate_P: Tensor, theta: float) -> Tensor:
        """See `RopeScaling`."""
        return torch.zeros_like(rate_P)


class Llama3Scaling(NamedTuple):
    """Llama 3's frequencies.

    The frequency of a pair that makes more than `high_freq_factor` revolutions in
    `original_max_position` tokens is kept. With fewer than `low_freq_factor` revolutions it is
    divided by `factor`. In between, the two are blended linearly in the number of revolutions.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    gain: float = 1.0

    def kept(self, rate_P: Tensor, theta: float) -> Tensor:
        """See `RopeScaling`."""
        revolutions = self.original_max_position * rate_P / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        return ((revolutions - low) / (high - low)).clamp(0, 1)


class YarnScaling(NamedTuple):
    """YaRN (arXiv 2309.00071, section 3.2), with the roundings of its published models.

    Pairs that make more than `beta_fast` revolutions in `original_max_position` tokens keep their
    frequency, those with fewer than `beta_slow` have it divided by `factor`. In between the share
    falls linearly in the number of the pair. truncate: the ramp begins and ends at whole pairs.
    attention_factor: multiplies rotated queries and keys; None: 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    @property
    def gain(self) -> float:
        """See `RopeScaling`."""
        given = self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if given is None else given

    def kept(self, rate_P: Tensor, theta: float) -> Tensor:
        """See `RopeScaling`."""
        pairs = len(rate_P)
        first, last = (
            pairs * math.log(self.original_max_position / (2 * math.pi * turns)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        last += 0.001 if first == last else 0.0
        pair = torch.arange(pairs, dtype=rate_P.dtype)
        return 1 - ((pair - first) / (last - first)).clamp(0, 1)


def rope_tables(
    length_tokens: int,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, R/2], of position * theta^(-2i/R), computed in float64.

    A scaling changes the frequencies, and multiplies both tables by its gain.
    length_tokens: the number of positions. rotary_dim R: the number of elements of each head that
    are rotated, even; 0 gives tables without columns. Raises ValueError.
    """
    if rotary_dim < 0 or rotary_dim % 2 or length_tokens < 0 or not 0 < theta < math.inf:
        raise ValueError(
            f"rope: rotary_dim={rotary_dim}, length={length_tokens}, theta={theta}; expected an "
            "even number of elements, 0 or more positions and a positive base"
        )

    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(1, rotary_dim)
    rate = theta**-exponent
    if scaling is not None:
        kept = scaling.kept(rate, theta)
        rate = rate * (kept + (1 - kept) / scaling.factor)

    # In float64, because a float32 angle near 10^6 radians is off by up to 0.03.
    position = torch.arange(length_tokens, dtype=torch.float64)
    angle = torch.outer(position, rate)
    cos, sin = angle.cos(), angle.sin()
    if scaling is not None and scaling.gain != 1:
        cos, sin = cos * scaling.gain, sin * scaling.gain
    dtype = sum_dtype(dtype)
    return cos.to(device, dtype), sin.to(device, dtype)


def _rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    """out = x with pairs (x[i], x[i + half]) of the last dim rotated by sign * angle.

    cos [..., 2 * half] holds the cosines twice, sin [..., half] the sines once; both have out's
    type, to which x is widened. Elements from 2 * half on are copied.
    """
    half, width = sin.shape[-1], 2 * sin.shape[-1]
    x = x.to(out.dtype)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    torch.mul(x[..., :width], cos, out=out[..., :width])
    out[..., :half].addcmul_(x[..., half:width], sin, value=-sign)
    out[..., half:width].addcmul_(x[..., :half], sin, value=sign)


def rotate_heads(
    x_TNH: Tensor,
    cos_sh: Tensor,
    sin_sh: Tensor,
    position_T: Tensor | None = None,
    *,
    inverse: bool = False,
) -> Tensor:
    """x[T, N, H] with every head rotated by its token's position: position_T[t], or t mod s.

    cos_sh, sin_sh: [s, R/2]. inverse: rotate back, which is the gradient.
    """
    if position_T is None:
        position_T = torch.arange(len(x_TNH), device=x_TNH.device) % len(cos_sh)
    cos, sin = (table[position_T].unsqueeze(1) for table in (cos_sh, sin_sh))
    out = torch.empty(x_TNH.shape, dtype=cos.dtype, device=cos.device)
    _rotate_into(out, x_TNH, torch.cat([cos, cos], -1), sin, -1.0 if inverse else 1.0)
    return out.to(x_TNH.dtype)


def _sequence_blocks(
    x_BskgH: Tensor, cos_sh: Tensor, sin_sh: Tensor
) -> Iterator[tuple[tuple[slice, slice], Tensor, Tensor]]:
    """(slices of the first two dims, cosines, sines) of blocks of about `block_elements` elements.

    x: [sequences, s, K, heads, H]. The cosines are repeated for all heads of a group, so that torch
    multiplies in long inner loops; the sines are [s, 1, 1, R/2].
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


def rotate(
    qkv_TkgH: Tensor, cos_sh: Tensor, sin_sh: Tensor, copy_values: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed heads and rotate queries and keys by their position (RoFormer, half-split form).

    qkv_TkgH: [T, K, N/K + 2, H]; a group holds its query heads, then its key, then its value.
    cos_sh, sin_sh: [s, R/2] with T a multiple of s; token t has position t mod s. The first R
    elements of each head are rotated, the others are copied.
    Returns q[T, K, N/K, H], k[T, K, 1, H] (new) and v[T, K, 1, H] (a view, or with `copy_values`
    new).
    """
    tokens, groups, packed, head_dim = qkv_TkgH.shape
    queries = packed - 2
    q = qkv_TkgH.new_empty(tokens, groups, queries, head_dim)
    k = qkv_TkgH.new_empty(tokens, groups, 1, head_dim)
    qkv, q_B, k_B = (x.view(-1, len(cos_sh), *x.shape[1:]) for x in (qkv_TkgH, q, k))
    heads = qkv[:, :, :, : queries + 1]
    for at, cos, sin in _sequence_blocks(heads, cos_sh, sin_sh):
        rotated = torch.empty(heads[at].shape, dtype=cos.dtype, device=cos.device)
        _rotate_into(rotated, heads[at], cos, sin, 1.0)
        q_B[at] = rotated[:, :, :, :queries]
        k_B[at] = rotated[:, :, :, queries:]
    v = qkv_TkgH[:, :, queries + 1 :]
    return q, k, v.clone(memory_format=torch.contiguous_format) if copy_values else v


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
        # 16-bit heads are rotated in the tables' type and rounded once
        rotated = heads[at] if heads.dtype == wide.dtype else torch.empty_like(wide)
        _rotate_into(rotated, wide, cos, sin, -1.0)
        if rotated.dtype != heads.dtype:
            heads[at] = rotated
    dqkv_TkgH[:, :, queries + 1 :].copy_(dv)
