"""Attention under interval masks as custom operators; shapes as in `plain.interval_attention`."""

from __future__ import annotations

from torch import Tensor

from megalite.kernels.operators.checks import check_sides
from megalite.kernels.operators.common import new_stats, operator, ops_of, stated_types
from megalite.kernels.plain.intervals import Intervals


@operator("megalite::attention")
def attention(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    lo: Tensor,
    up: Tensor,
    key_lo: Tensor,
    key_up: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """(o[T, N, H], lse[N, T]) under the interval mask."""
    mask = Intervals(lo, up, key_lo, key_up)
    check_sides(mask)
    with stated_types(q_TNH):
        return ops_of(q_TNH).interval_attention(q_TNH, k_SKH, v_SKH, mask, scale)


@attention.register_fake
def _(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    lo: Tensor,
    up: Tensor,
    key_lo: Tensor,
    key_up: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q_TNH.shape
    return q_TNH.new_empty(q_TNH.shape), new_stats(q_TNH, heads, tokens)


@operator("megalite::attention_grad")
def attention_grad(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    o_TNH: Tensor,
    lse_NT: Tensor,
    lo: Tensor,
    up: Tensor,
    key_lo: Tensor,
    key_up: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); o and lse of the whole softmax, so gradients over chunks of keys add up."""
    mask = Intervals(lo, up, key_lo, key_up)
    with stated_types(q_TNH):
        return ops_of(q_TNH).interval_attention_grad(
            do_TNH, q_TNH, k_SKH, v_SKH, o_TNH, lse_NT, mask, scale
        )


@attention_grad.register_fake
def _(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    o_TNH: Tensor,
    lse_NT: Tensor,
    lo: Tensor,
    up: Tensor,
    key_lo: Tensor,
    key_up: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q_TNH.new_empty(q_TNH.shape),
        k_SKH.new_empty(k_SKH.shape),
        v_SKH.new_empty(v_SKH.shape),
    )
