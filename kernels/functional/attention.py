"""Attention under interval masks; shapes as in `plain.interval_attention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.functional.checks import FLOATS, Arg, check
from megalite.kernels.functional.operator import new, new_stats, operator
from megalite.kernels.operations import Kernels
from megalite.kernels.plain.intervals import Intervals

_MASK = "Tensor lo, Tensor up, Tensor key_lo, Tensor key_up"


def _compute(ops: Kernels, q: Tensor, k: Tensor, v: Tensor, *mask_and_scale: Any) -> Any:
    *bounds, scale = mask_and_scale
    mask = Intervals(*bounds)
    _check_sides(mask)
    return ops.interval_attention(q, k, v, mask, scale)


def _compute_grad(ops: Kernels, *arguments: Any) -> Any:
    *tensors, lo, up, key_lo, key_up, scale = arguments
    return ops.interval_attention_grad(*tensors, Intervals(lo, up, key_lo, key_up), scale)


# o and lse are those of the whole softmax, so gradients over chunks of keys add up
_attention_grad = operator(
    f"attention_grad(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_MASK},"
    " float? scale) -> (Tensor dq, Tensor dk, Tensor dv)",
    _compute_grad,
    lambda do, q, k, v, *_: (new(q), new(k), new(v)),
)
_attention = operator(
    f"attention(Tensor q, Tensor k, Tensor v, {_MASK}, float? scale) -> (Tensor o, Tensor lse)",
    _compute,
    lambda q, *_: (new(q), new_stats(q, q.shape[1], len(q))),
    _attention_grad,
)


def attention(
    q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, mask: Intervals, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(o[T, N, H], lse[N, T]): query i sees keys mask.lo[i] <= j < mask.up[i].

    `document_intervals` makes masks of packed documents, causal or not, with a window or not; the
    sequences of a batch are documents in a row. N is a multiple of the number of k's heads. lse
    has no gradient. scale: the factor of the scores, 1 / sqrt(H) by default. On the CPU all scores
    are in memory at once; on CUDA H is 16, 32, 64, 80, 96, 128 or 256.
    """
    if not isinstance(mask, Intervals):
        raise TypeError(
            f"attention: mask is a {type(mask).__name__}, expected Intervals; "
            "document_intervals makes them"
        )
    bounds = {"lo": "queries", "up": "queries", "key_lo": "keys", "key_up": "keys"}
    sizes = check(
        "attention",
        q=Arg(q_TNH, FLOATS, "queries, heads, head dim"),
        k=Arg(k_SKH, "q", "keys, key/value heads, head dim"),
        v=Arg(v_SKH, "k", "k"),
        **{f"mask.{x}": Arg(getattr(mask, x), (torch.int32,), dim) for x, dim in bounds.items()},
    )
    heads, kv_heads, head_dim = (sizes[x] for x in ("heads", "key/value heads", "head dim"))
    if kv_heads == 0 or heads % kv_heads or head_dim == 0:
        raise ValueError(
            f"attention: {heads} query heads of {head_dim} over {kv_heads} key/value heads, "
            "expected a multiple of at least one key/value head, and at least one element"
        )
    if scale is not None and not 0.0 < scale < math.inf:
        raise ValueError(f"attention: scale={scale}, expected a positive number")

    mask = mask.cut(len(q_TNH), len(k_SKH))
    o, lse = _attention(q_TNH, k_SKH, v_SKH, mask.lo, mask.up, mask.key_lo, mask.key_up, scale)
    return o, lse


def _check_sides(mask: Intervals) -> None:
    """Raise ValueError if a mask on a CPU differs by queries and by keys."""
    if mask.lo.device.type != "cpu":
        return
    query, key = torch.arange(len(mask.lo))[:, None], torch.arange(len(mask.key_lo))
    by_query = (key >= mask.lo[:, None]) & (key < mask.up[:, None])
    by_key = (query >= mask.key_lo) & (query < mask.key_up)
    if not torch.equal(by_query, by_key):
        i, j = (by_query != by_key).nonzero()[0].tolist()
        raise ValueError(
            f"attention: mask.lo and mask.up let query {i} see key {j}: {bool(by_query[i, j])}, "
            f"mask.key_lo and mask.key_up: {bool(by_key[i, j])}; gradients would be of another "
            "mask; document_intervals makes both sides"
        )
