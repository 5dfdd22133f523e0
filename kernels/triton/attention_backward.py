"""The backward of attention in Triton: dQ, and dK with dV, in separate kernels.

With p and ds as in `triton.attention`. That takes seven products instead of five, but no atomics,
so gradients are the same bits on every run. dK and dV sum over the query heads of a group; where
blocks of keys and their heads would leave multiprocessors idle, several programs share a group,
and a pass more sums their results in a fixed order. Dropout computes the forward's mask again from
its counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.arguments import cdiv, check_shape, num_programs
from megalite.kernels.plain.dropout import AttentionDropout
from megalite.kernels.plain.intervals import Intervals, check_documents, document_intervals
from megalite.kernels.triton.attention import attention_delta, attention_forward
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
from megalite.kernels.upload import upload


@triton.jit
def _row_stats(stats_ptr, head, row, rows, N: tl.constexpr, ROWS: tl.constexpr):
    """(base-2 lse, delta) of rows; lse is +inf past the end."""
    inside = row + tl.arange(0, ROWS) < rows
    at = head.to(tl.int64) * rows + row + tl.arange(0, ROWS)
    lse = tl.load(stats_ptr + at, mask=inside, other=float("inf"))
    stats_ptr += tl.cast(rows, tl.int64) * N
    return lse, tl.load(stats_ptr + at, mask=inside, other=0.0)


@triton.jit
def _dq_step(
    q, do, lse, delta, dq, k_src, v_src, column, keys, head, k_stride, v_stride, lo, up, scale,
    a, b, first_key, key0, threshold, keep_scale,
    BN: tl.constexpr, H: tl.constexpr, TMA: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """dq plus the part of one block of keys."""
    k = load_tile(k_src, column, keys, head, k_stride, BN, H, TMA)
    v = load_tile(v_src, column, keys, head, v_stride, BN, H, TMA)
    s = tl.dot(q, k.T, input_precision="ieee")
    p = tl.exp2(s * scale - lse[:, None])
    if MASK:
        j = column + tl.arange(0, BN)
        seen = (j[None, :] >= lo[:, None]) & (j[None, :] < up[:, None])
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(do, v.T, input_precision="ieee")
    if DROP:
        c = key_words(first_key, column, key0, BN)
        dp = tl.where(kept(a[:, None], b[:, None], c[None, :], threshold), dp * keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@prepared
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _dq_kernel(
    q_src, k_src, v_src, do_src, stats_ptr, dq_ptr, lo_ptr, up_ptr, queries, keys,
    q_stride, k_stride, v_stride, do_stride, scale, dq_scale,
    first_query, first_key, first_head, key0, key1, threshold, keep_scale,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TMA: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    # heads fastest and longest rows first, as in the forward
    head = tl.program_id(0)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    kv_head = head // GROUP
    lo, up, start, full_start, full_stop, stop = bounds(lo_ptr, up_ptr, row, queries, keys, BM, BN)
    q = load_tile(q_src, row, queries, head, q_stride, BM, H, TMA)
    do = load_tile(do_src, row, queries, head, do_stride, BM, H, TMA)
    lse, delta = _row_stats(stats_ptr, head, row, queries, N, BM)

    BLOCK: tl.constexpr = triton.next_power_of_2(H)
    dq = tl.zeros((BM, BLOCK), dtype=tl.float32)
    a = 0
    b = 0
    if DROP:
        a, b = query_words(first_query, row, first_head + head, key0, key1, BM)

    # the masked blocks of both sides in one loop, so that their step is compiled once
    left = full_start - start
    for i in range(0, left + stop - full_stop, BN):
        column = tl.where(i < left, start + i, full_stop + i - left)
        dq = _dq_step(
            q, do, lse, delta, dq, k_src, v_src, column, keys, kv_head, k_stride, v_stride, lo, up,
            scale, a, b, first_key, key0, threshold, keep_scale, BN, H, TMA, True, DROP,
        )  # fmt: skip
    for column in range(full_start, full_stop, BN):
        dq = _dq_step(
            q, do, lse, delta, dq, k_src, v_src, column, keys, kv_head, k_stride, v_stride, lo, up,
            scale, a, b, first_key, key0, threshold, keep_scale, BN, H, TMA, False, DROP,
        )  # fmt: skip

    store_tile(dq_ptr, dq * dq_scale, row, queries, head, N * H, BM, H)


@triton.jit
def _dkdv_step(
    k, v, dk, dv, q_src, do_src, stats_ptr, row, queries, head, q_stride, do_stride, lo, up, scale,
    c, first_query, first_head, key0, key1, threshold, keep_scale,
    N: tl.constexpr, BM: tl.constexpr, H: tl.constexpr, TMA: tl.constexpr, MASK: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """(dk, dv) plus the part of one block of queries.

    Scores are transposed here, [keys, queries], so the products take p and ds from registers.
    """
    q = load_tile(q_src, row, queries, head, q_stride, BM, H, TMA)
    do = load_tile(do_src, row, queries, head, do_stride, BM, H, TMA)
    lse, delta = _row_stats(stats_ptr, head, row, queries, N, BM)

    s = tl.dot(k, q.T, input_precision="ieee")
    p = tl.exp2(s * scale - lse[None, :])
    if MASK:
        i = row + tl.arange(0, BM)
        seen = (i[None, :] >= lo[:, None]) & (i[None, :] < up[:, None])
        p = tl.where(seen, p, 0.0)
    if DROP:
        a, b = query_words(first_query, row, first_head + head, key0, key1, BM)
        keep = kept(a[None, :], b[None, :], c[:, None], threshold)

    # dv takes the weights after dropout, ds those before it; dp passes through the mask
    if DV:
        dropped = p
        if DROP:
            dropped = tl.where(keep, p * keep_scale, 0.0)
        dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision="ieee")
    if DK:
        dp = tl.dot(v, do.T, input_precision="ieee")
        if DROP:
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@prepared
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _dkdv_kernel(
    q_src, k_src, v_src, do_src, stats_ptr, dk_ptr, dv_ptr, lo_ptr, up_ptr, queries, keys,
    q_stride, k_stride, v_stride, do_stride, scale, dk_scale,
    first_query, first_key, first_head, key0, key1, threshold, keep_scale,
    K: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, H: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, TMA: tl.constexpr, TWO_LOOPS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    # each program takes a share of the query heads of a group, and writes a sum of its own
    HEADS: tl.constexpr = GROUP // SPLITS
    kv_head = tl.program_id(0) // SPLITS
    share = tl.program_id(0) % SPLITS
    first = tl.program_id(0) * HEADS
    # under a causal mask the first keys are seen most, so the longest programs come first here too
    column = tl.program_id(1) * BN
    lo, up, start, full_start, full_stop, stop = bounds(
        lo_ptr, up_ptr, column, keys, queries, BN, BM
    )
    k = load_tile(k_src, column, keys, kv_head, k_stride, BN, H, TMA)
    v = load_tile(v_src, column, keys, kv_head, v_stride, BN, H, TMA)

    BLOCK: tl.constexpr = triton.next_power_of_2(H)
    dk = tl.zeros((BN, BLOCK), dtype=tl.float32)
    dv = tl.zeros((BN, BLOCK), dtype=tl.float32)
    if not TWO_LOOPS:
        full_start = stop
        full_stop = stop
    c = 0
    if DROP:
        c = key_words(first_key, column, key0, BN)

    N: tl.constexpr = K * GROUP
    # one loop over all its query heads: nested loops cost registers
    left = full_start - start
    span = left + stop - full_stop
    head = first
    i = 0
    for _ in range(0, span * HEADS, BM):
        row = tl.where(i < left, start + i, full_stop + i - left)
        dk, dv = _dkdv_step(
            k, v, dk, dv, q_src, do_src, stats_ptr, row, queries, head, q_stride, do_stride,
            lo, up, scale, c, first_query, first_head, key0, key1, threshold, keep_scale,
            N, BM, H, TMA, True, DK, DV, DROP,
        )  # fmt: skip
        i += BM
        head += tl.where(i == span, 1, 0)
        i = tl.where(i == span, 0, i)

    if TWO_LOOPS:
        head = first
        row = full_start
        for _ in range(0, (full_stop - full_start) * HEADS, BM):
            dk, dv = _dkdv_step(
                k, v, dk, dv, q_src, do_src, stats_ptr, row, queries, head, q_stride, do_stride,
                lo, up, scale, c, first_query, first_head, key0, key1, threshold, keep_scale,
                N, BM, H, TMA, False, DK, DV, DROP,
            )  # fmt: skip
            row += BM
            head += tl.where(row == full_stop, 1, 0)
            row = tl.where(row == full_stop, full_start, row)

    offset = tl.cast(keys, tl.int64) * (K * H) * share
    if DK:
        store_tile(dk_ptr + offset, dk * dk_scale, column, keys, kv_head, K * H, BN, H)
    if DV:
        store_tile(dv_ptr + offset, dv, column, keys, kv_head, K * H, BN, H)


@prepared
@triton.jit
def _splits_kernel(
    dk_parts_ptr, dv_parts_ptr, dk_ptr, dv_ptr, length, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    parts_ptr, out_ptr = dk_parts_ptr, dk_ptr
    if tl.program_id(1) == 1:
        parts_ptr, out_ptr = dv_parts_ptr, dv_ptr
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(SPLITS):
        source = parts_ptr + tl.cast(length, tl.int64) * part
        total += tl.load(source + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def dkdv_splits(key_blocks: int, kv_heads: int, group: int, multiprocessors: int) -> int:
    """Programs among which the query heads of a group are divided for dk and dv.

    key_blocks: blocks of keys of a head. group: query heads of a key/value head. A causal mask
    makes the longest program twice the mean, and a multiprocessor holds one program, so that two
    programs a multiprocessor could fill the device, and two and a half do in the order in which
    they start; fewer splits cost fewer partial sums.
    """
    programs = key_blocks * kv_heads
    divisors = [n for n in range(1, group + 1) if group % n == 0]
    return next((n for n in divisors if 2 * n * programs >= 5 * multiprocessors), group)


def attention_backward(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    stats_2NT: Tensor,
    mask: Intervals,
    scale: float | None = None,
    *,
    drop: Drop | None = None,
    dq_tiles: AttentionTiles | None = None,
    dkdv_tiles: AttentionTiles | None = None,
    tma: bool | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq[T, N, H], dk[S, K, H], dv[S, K, H]) for the gradient do of the output.

    stats: from `attention_delta`. scale and drop: those of the forward. tma: as in
    `attention_forward`. splits: programs a group's query heads are divided among for dk and dv
    (None: `dkdv_splits`); more than one work in float32 [splits, S, K, H] of dk, and of dv. Raises
    TypeError, ValueError.
    """
    check_inputs(q_TNH, k_SKH, v_SKH, mask)
    queries, heads, head_dim = q_TNH.shape
    keys, kv_heads, _ = k_SKH.shape
    check_shape("attention_backward", (queries, heads, head_dim), do=do_TNH)
    check_shape("attention_backward", (2, heads, queries), stats=stats_2NT)
    q, k, v, do = (flat(x) for x in (q_TNH, k_SKH, v_SKH, do_TNH))
    dq_TNH = q_TNH.new_empty(queries, heads, head_dim)
    dk_SKH, dv_SKH = (k_SKH.new_empty(keys, kv_heads, head_dim) for _ in range(2))
    if not (queries and keys):
        return dq_TNH.zero_(), dk_SKH.zero_(), dv_SKH.zero_()

    # Descriptors first, since the table has other tiles for loads through pointers.
    use_tma = tma_fits(head_dim, q, k, v, do) if tma is None else tma
    scale = positive_scale(scale, head_dim)
    dropping = drop.arguments() if drop else NO_DROP
    strides = (q.stride(0), k.stride(0), v.stride(0), do.stride(0))

    tiles = {"tma": use_tma, "drop": drop is not None}
    t = dq_tiles or default_tiles("dq", head_dim, q.dtype, **tiles)
    u = dkdv_tiles or default_tiles("dkdv", head_dim, q.dtype, **tiles)
    # Blocks of as many rows are loaded by one descriptor in both kernels.
    by_queries = {
        n: [operand(x, n, head_dim, use_tma) for x in (q, do)] for n in {t.queries, u.queries}
    }
    by_keys = {n: [operand(x, n, head_dim, use_tma) for x in (k, v)] for n in {t.keys, u.keys}}

    q_tiles, do_tiles = by_queries[t.queries]
    _dq_kernel[(heads, cdiv(queries, t.queries))](
        q_tiles,
        *by_keys[t.keys],
        do_tiles,
        stats_2NT,
        dq_TNH,
        mask.lo.contiguous(),
        mask.up.contiguous(),
        queries,
        keys,
        *strides,
        scale * LOG2_E,
        scale,
        *dropping,
        N=heads,
        GROUP=heads // kv_heads,
        H=head_dim,
        TMA=use_tma,
        DROP=drop is not None,
        **t.options(),
    )

    # Two sums of 256 columns do not fit in registers, so each gets a pass of its own.
    passes = [(True, True)] if head_dim <= 128 else [(True, False), (False, True)]
    blocks, group = cdiv(keys, u.keys), heads // kv_heads
    splits = splits or dkdv_splits(blocks, kv_heads, group, num_programs(k.device))
    if group % splits:
        raise ValueError(f"attention_backward: splits={splits}, expected a divisor of {group}")
    parts = [dk_SKH, dv_SKH]
    if splits > 1:
        parts = [x.new_empty(splits, *x.shape, dtype=torch.float32) for x in parts]
    q_tiles, do_tiles = by_queries[u.queries]
    for with_dk, with_dv in passes:
        _dkdv_kernel[(kv_heads * splits, blocks)](
            q_tiles,
            *by_keys[u.keys],
            do_tiles,
            stats_2NT,
            *parts,
            mask.key_lo.contiguous(),
            mask.key_up.contiguous(),
            queries,
            keys,
            *strides,
            scale * LOG2_E,
            scale,
            *dropping,
            K=kv_heads,
            GROUP=group,
            SPLITS=splits,
            H=head_dim,
            TMA=use_tma,
            TWO_LOOPS=u.two_loops,
            DK=with_dk,
            DV=with_dv,
            DROP=drop is not None,
            **u.options(),
        )
    if splits > 1:
        use = choose("attention_splits")
        _splits_kernel[(cdiv(dk_SKH.numel(), use["block"]), 2)](
            *parts, dk_SKH, dv_SKH, dk_SKH.numel(), SPLITS=splits, **use["launch"]
        )
    return dq_TNH, dk_SKH, dv_SKH


def attention_grad(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    o_TNH: Tensor,
    lse_NT: Tensor,
    mask: Intervals,
    scale: float | None = None,
    *,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `attention_forward`; o and lse of the whole softmax."""
    stats_2NT = attention_delta(o_TNH, do_TNH, lse_NT)
    return attention_backward(do_TNH, q_TNH, k_SKH, v_SKH, stats_2NT, mask, scale, drop=drop)


def document_mask(cu_seqlens: Sequence[int], window: int | None, device: torch.device) -> Intervals:
    """The mask for `document_attention`, as intervals on the device. Raises ValueError."""
    check_documents(cu_seqlens, window)
    bounds = upload(torch.tensor(cu_seqlens, dtype=torch.int64), device)
    return document_intervals(bounds, cu_seqlens[-1], window=window)


def document_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    mask: Intervals,
    drop: AttentionDropout | None = None,
    scale: float | None = None,
) -> Tensor:
    """out[T, N, H], differentiable once: RuntimeError in a backward with create_graph."""
    o_TNH: Tensor = _Attention.apply(q_TNH, k_TKH, v_TKH, mask, drop, scale)
    return o_TNH


class _Attention(torch.autograd.Function):
    """q[T, N, H], k and v [T, K, H] -> o[T, N, H]; keeps inputs, output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Intervals,
        drop: AttentionDropout | None,
        scale: float | None,
    ) -> Tensor:
        # queries and keys are the same tokens
        ctx.mask, ctx.drop, ctx.scale = mask, None, scale
        if drop is not None:
            first = drop.first_token
            ctx.drop = Drop(drop.p, drop.key, first, first, drop.first_head)
        o, lse = attention_forward(q, k, v, mask, scale, drop=ctx.drop)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        if torch.is_grad_enabled():  # as create_graph=True has it
            raise RuntimeError(
                "attention: its gradient has none of its own, so that it would go missing in "
                "silence; leave out create_graph, or set kernels.backend=reference"
            )
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = attention_grad(do, q, k, v, o, lse, ctx.mask, ctx.scale, drop=ctx.drop)
        return dq, dk, dv, None, None, None
