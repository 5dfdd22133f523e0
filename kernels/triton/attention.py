"""Attention with an interval mask in Triton: forward, delta, and merging of chunks.

Query i sees keys lo[i] <= j < up[i] (see `plain.intervals`). Each of K key/value heads is read by
N / K of N query heads. Scores are kept in base 2, softmax and sums in float32, products in the
storage type. With s = scale * q k^T:

    p = exp(s - lse),  o = p v,  delta = sum over H of o * do
    dv = p^T do,  ds = p * (do v^T - delta),  dq = scale * ds k,  dk = scale * ds^T q

The backward is in `triton.attention_backward`. A query that sees no key gives o = 0 and
lse = -inf. Chunks of a ring are merged by their lse (`merge_chunks`), and their backward takes the
merged lse and delta.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.arguments import cdiv, check_shape, next_power_of_2
from megalite.kernels.plain.intervals import Intervals
from megalite.kernels.triton.attention_tiles import (
    LOG2_E,
    NO_DROP,
    UNSPECIALIZED,
    AttentionTiles,
    Drop,
    bounds,
    check_inputs,
    default_tiles,
    flat,
    key_words,
    load_tile,
    operand,
    positive_scale,
    query_words,
    store_tile,
    tma_fits,
)
from megalite.kernels.triton.dropout import kept
from megalite.kernels.triton.launch import prepared
from megalite.kernels.triton.tables import choose


@triton.jit
def _forward_step(
    q, k_src, v_src, acc, top, total, column, keys, head, k_stride, v_stride, lo, up, scale,
    a, b, first_key, key0, threshold, keep_scale,
    BN: tl.constexpr, H: tl.constexpr, TMA: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """One block of keys: the online softmax's (weighted sum of v, maximum, sum of weights)."""
    k = load_tile(k_src, column, keys, head, k_stride, BN, H, TMA)
    s = tl.dot(q, k.T, input_precision="ieee")
    if MASK:
        j = column + tl.arange(0, BN)
        seen = (j[None, :] >= lo[:, None]) & (j[None, :] < up[:, None])
        s = tl.where(seen, s, float("-inf"))

    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    shift = new_top
    if MASK:
        # 0 instead of -inf for a row that has seen no key yet, since -inf - -inf is NaN
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s * scale - shift[:, None])
    keep = tl.exp2(top - shift)
    total = total * keep + tl.sum(p, 1)
    acc = acc * keep[:, None]

    # after the sum: dropout acts on the softmax's weights and leaves their sum as it is
    if DROP:
        c = key_words(first_key, column, key0, BN)
        p = tl.where(kept(a[:, None], b[:, None], c[None, :], threshold), p * keep_scale, 0.0)
    v = load_tile(v_src, column, keys, head, v_stride, BN, H, TMA)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_top, total


@prepared
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _forward_kernel(
    q_src, k_src, v_src, o_ptr, lse_ptr, lo_ptr, up_ptr, queries, keys,
    q_stride, k_stride, v_stride, scale,
    first_query, first_key, first_head, key0, key1, threshold, keep_scale,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TMA: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    # heads are the fast index, and the longest rows come first (under a causal mask late queries
    # see most): the last programs to start are the short ones of all heads
    head = tl.program_id(0)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    kv_head = head // GROUP
    lo, up, start, full_start, full_stop, stop = bounds(lo_ptr, up_ptr, row, queries, keys, BM, BN)
    q = load_tile(q_src, row, queries, head, q_stride, BM, H, TMA)

    BLOCK: tl.constexpr = triton.next_power_of_2(H)
    acc = tl.zeros((BM, BLOCK), dtype=tl.float32)
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    a = 0
    b = 0
    if DROP:
        a, b = query_words(first_query, row, first_head + head, key0, key1, BM)

    # the masked blocks of both sides in one loop, so that their step is compiled once
    left = full_start - start
    for i in range(0, left + stop - full_stop, BN):
        column = tl.where(i < left, start + i, full_stop + i - left)
        acc, top, total = _forward_step(
            q, k_src, v_src, acc, top, total, column, keys, kv_head, k_stride, v_stride, lo, up,
            scale, a, b, first_key, key0, threshold, keep_scale, BN, H, TMA, True, DROP,
        )  # fmt: skip
    for column in range(full_start, full_stop, BN):
        acc, top, total = _forward_step(
            q, k_src, v_src, acc, top, total, column, keys, kv_head, k_stride, v_stride, lo, up,
            scale, a, b, first_key, key0, threshold, keep_scale, BN, H, TMA, False, DROP,
        )  # fmt: skip

    # a row that sees no key has a total of 0 and must give o = 0, not NaN
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    store_tile(o_ptr, acc, row, queries, head, N * H, BM, H)
    lse = tl.where(empty, float("-inf"), top + tl.log2(total)) * 0.6931471805599453
    at = row + tl.arange(0, BM)
    tl.store(lse_ptr + head.to(tl.int64) * queries + at, lse, mask=at < queries)


@prepared
@triton.jit
def _delta_kernel(
    o_ptr, do_ptr, lse_ptr, stats_ptr, rows, o_stride, do_stride,
    N: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    o = load_tile(o_ptr, row, rows, head, o_stride, ROWS, H, False).to(tl.float32)
    do = load_tile(do_ptr, row, rows, head, do_stride, ROWS, H, False).to(tl.float32)
    inside = row + tl.arange(0, ROWS) < rows
    at = head.to(tl.int64) * rows + row + tl.arange(0, ROWS)
    lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
    # +inf if the row sees no key, so that every p of the row is 0
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(stats_ptr + at, lse, mask=inside)
    stats_ptr += tl.cast(rows, tl.int64) * N
    tl.store(stats_ptr + at, tl.sum(o * do, 1), mask=inside)


def attention_forward(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    mask: Intervals,
    scale: float | None = None,
    *,
    drop: Drop | None = None,
    tiles: AttentionTiles | None = None,
    tma: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(o[T, N, H], lse[N, T]) of T queries over S keys. Raises TypeError, ValueError.

    scale: the factor of the scores, 1 / sqrt(H) by default. lse: float32, natural logarithm. tma:
    load inputs through descriptors (None: if alignment and H allow). drop: dropout of the softmax's
    weights; lse and the softmax's sums are those without it.
    """
    check_inputs(q_TNH, k_SKH, v_SKH, mask)
    queries, heads, head_dim = q_TNH.shape
    keys, kv_heads, _ = k_SKH.shape
    q, k, v = (flat(x) for x in (q_TNH, k_SKH, v_SKH))
    o_TNH = q_TNH.new_empty(queries, heads, head_dim)
    lse_NT = q_TNH.new_empty(heads, queries, dtype=torch.float32)
    if not queries:
        return o_TNH, lse_NT
    if not keys:
        return o_TNH.zero_(), lse_NT.fill_(-torch.inf)

    # Descriptors first, since the table has other tiles for loads through pointers.
    use_tma = tma_fits(head_dim, q, k, v) if tma is None else tma
    t = tiles or default_tiles("forward", head_dim, q.dtype, tma=use_tma, drop=drop is not None)
    scale = positive_scale(scale, head_dim)
    dropping = drop.arguments() if drop else NO_DROP
    _forward_kernel[(heads, cdiv(queries, t.queries))](
        operand(q, t.queries, head_dim, use_tma),
        operand(k, t.keys, head_dim, use_tma),
        operand(v, t.keys, head_dim, use_tma),
        o_TNH,
        lse_NT,
        mask.lo.contiguous(),
        mask.up.contiguous(),
        queries,
        keys,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        scale * LOG2_E,
        *dropping,
        N=heads,
        GROUP=heads // kv_heads,
        H=head_dim,
        TMA=use_tma,
        DROP=drop is not None,
        **t.options(),
    )
    return o_TNH, lse_NT


def attention_delta(o_TNH: Tensor, do_TNH: Tensor, lse_NT: Tensor) -> Tensor:
    """The statistics of rows for the backward: float32 [2, N, T] = lse in base 2, sum of o * do.

    o and lse are those of the whole softmax: for a chunk of a ring, the merged ones. In the result
    lse is +inf for a query that sees no key. Raises ValueError.
    """
    tokens, heads, head_dim = o_TNH.shape
    check_shape("attention_delta", (tokens, heads, head_dim), do=do_TNH)
    check_shape("attention_delta", (heads, tokens), lse=lse_NT)

    # Computed once here and not in both backward kernels, which would each read o for it.
    o, do = flat(o_TNH), flat(do_TNH)
    stats_2NT = o.new_empty(2, heads, tokens, dtype=torch.float32)
    use = choose("attention_delta")
    rows = max(1, use["elements"] // next_power_of_2(head_dim))
    if tokens:
        _delta_kernel[(cdiv(tokens, rows), heads)](
            o,
            do,
            lse_NT.contiguous(),
            stats_2NT,
            tokens,
            o.stride(0),
            do.stride(0),
            N=heads,
            H=head_dim,
            ROWS=rows,
            **use["launch"],
        )
    return stats_2NT


def merge_chunks(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(o, lse) over all keys from the (o[T, N, H], lse[N, T]) of chunks of keys, in float32."""
    lse_cNT = torch.stack([lse for _, lse in parts])
    top = lse_cNT.amax(0)
    shift = top.where(top.isfinite(), 0.0)
    weight_cNT = (lse_cNT - shift).exp()
    total_NT = weight_cNT.sum(0)
    weight_cNT = weight_cNT / total_NT.where(total_NT > 0, 1.0)
    o = sum(
        o.float() * weight.t().unsqueeze(2)
        for (o, _), weight in zip(parts, weight_cNT, strict=True)
    )
    assert isinstance(o, Tensor)
    return o, shift + total_NT.log()
