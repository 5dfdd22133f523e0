"""Attention under an interval mask in plain torch: output, log-sum-exp, and an explicit backward.

All scores are in memory at once: this is the definition and the path of small cases, not fast.
Shapes: T queries, S keys, N query heads, K key/value heads, H head dim. Sums in at least float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.kernels.plain.intervals import Intervals


def _wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is of that type."""
    return x if x.dtype == torch.float64 else x.float()


def _by_head(x_THD: Tensor, heads: int) -> Tensor:
    """[heads, T, H] of [T, K, H], each key/value head repeated for its group."""
    group = heads // x_THD.shape[1]
    return _wide(x_THD).repeat_interleave(group, 1).transpose(0, 1)


def _visible(mask: Intervals, keys: int) -> Tensor:
    """bool [T, S]: the query sees the key."""
    key = torch.arange(keys, device=mask.lo.device)
    return (key >= mask.lo[:, None]) & (key < mask.up[:, None])


def _scores(q_TNH: Tensor, k_SKH: Tensor, mask: Intervals, scale: float | None) -> Tensor:
    """scale * q k^T [N, T, S], -inf where the query does not see the key."""
    heads, head_dim = q_TNH.shape[1:]
    q, k = _by_head(q_TNH, heads), _by_head(k_SKH, heads)
    scores = (q @ k.transpose(1, 2)) * (head_dim**-0.5 if scale is None else scale)
    return scores.masked_fill(~_visible(mask, len(k_SKH)), -torch.inf)


def interval_attention(
    q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, mask: Intervals, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(o[T, N, H], lse[N, T]): o is 0 and lse -inf for a query that sees no key.

    scale: the factor of the scores, 1 / sqrt(H) by default.
    """
    scores = _scores(q_TNH, k_SKH, mask, scale)
    lse_NT = scores.logsumexp(-1)
    weights = (scores - _finite(lse_NT).unsqueeze(2)).exp()
    o = weights @ _by_head(v_SKH, q_TNH.shape[1])
    return o.transpose(0, 1).to(q_TNH.dtype).contiguous(), lse_NT


def interval_attention_grad(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    o_TNH: Tensor,
    lse_NT: Tensor,
    mask: Intervals,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the inputs' types. o and lse: of the whole softmax, so of all chunks merged.

    With scores s, p = exp(s - lse) and delta = sum over H of o * do:
    dv = p^T do, ds = p * (do v^T - delta), dq = scale * ds k, dk = scale * ds^T q.
    """
    heads, head_dim = q_TNH.shape[1:]
    factor = head_dim**-0.5 if scale is None else scale

    # The weights are computed again from lse, which is cheaper than keeping N x T x S of them.
    weights = (_scores(q_TNH, k_SKH, mask, scale) - _finite(lse_NT).unsqueeze(2)).exp()
    q, k, v = (_by_head(x, heads) for x in (q_TNH, k_SKH, v_SKH))
    do, o = (_wide(x).transpose(0, 1) for x in (do_TNH, o_TNH))
    ds = weights * (do @ v.transpose(1, 2) - (do * o).sum(-1, keepdim=True))

    # A key/value head was read by every query head of its group, so its gradient is their sum.
    groups = (k_SKH.shape[1], heads // k_SKH.shape[1])
    dq = ds @ k * factor
    dk, dv = (
        x.unflatten(0, groups).sum(1)
        for x in (ds.transpose(1, 2) @ q * factor, weights.transpose(1, 2) @ do)
    )

    pairs = ((dq, q_TNH), (dk, k_SKH), (dv, v_SKH))
    first, second, third = (dx.transpose(0, 1).to(x.dtype).contiguous() for dx, x in pairs)
    return first, second, third


def _finite(lse_NT: Tensor) -> Tensor:
    """0 in place of -inf, so that rows without keys give weights of 0 instead of NaN."""
    return lse_NT.masked_fill(lse_NT == -torch.inf, 0.0)
