"""Attention under interval masks as custom operators; shapes as in `plain.interval_attention`."""

from __future__ import annotations

from torch import Tensor
from torch.library import custom_op

from megalite.kernels.operators.checks import check_sides
from megalite.kernels.operators.common import new_stats, ops_of, stated_types
from megalite.kernels.plain.intervals import Intervals


@custom_op("megalite::attention", mutates_args=())
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


@custom_op("megalite::attention_grad", mutates_args=())
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
    """(dq, dk, dv); o and lse of the whole softmax, so that chunks of keys can be summed."""
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
    return tuple(x.new_empty(x.shape) for x in (q_TNH, k_SKH, v_SKH))  # type: ignore[return-value]
