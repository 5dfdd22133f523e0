"""Attention with an interval mask in Triton: forward, delta, dQ, and dK with dV.

Query i sees keys lo[i] <= j < up[i] (see `intervals`). N query heads read K key/value heads, N / K
each. Scores are kept in base 2, softmax and sums in float32, products in the storage type. With
s = scale * q k^T:

    p = exp(s - lse),  o = p v,  delta = sum over H of o * do
    dv = p^T do,  ds = p * (do v^T - delta),  dq = scale * ds k,  dk = scale * ds^T q

dQ and dK/dV are separate kernels: seven products instead of five, but no atomics, so results are
the same bits on every run. A query that sees nothing gives o = 0 and lse = -inf. Chunks of a ring
merge by their lse (`merge_chunks`), and their backward takes the merged lse and delta.

Each block of queries walks its partly visible key blocks first, with the mask, and then the fully
visible ones without. Inputs come through TMA descriptors of the 2-D view [T, heads * H] where H is
a power of two and memory is aligned, else through masked pointers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from megalite.kernels.intervals import Intervals
from megalite.kernels.triton_common import (
    OPTIONS,
    cdiv,
    check_float,
    check_same,
    check_shape,
    next_power_of_2,
)
from megalite.kernels.triton_dropout import keep_threshold, kept, mix, row_word, signed_word
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
LOG2_E = 1.4426950408889634
UNSPECIALIZED = ["first_query", "first_key", "first_head", "key0", "key1", "threshold"]
_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


@triton.jit
def _tile(source, row, rows, head, stride, ROWS: tl.constexpr, H: tl.constexpr, TMA: tl.constexpr):
    """Rows row ... row + ROWS - 1 of one head, [ROWS, next power of two of H], 0 outside."""
    if TMA:
        tile = source.load([row, head * H])
    else:
        BLOCK: tl.constexpr = triton.next_power_of_2(H)
        at = row + tl.arange(0, ROWS).to(tl.int64)
        dim = tl.arange(0, BLOCK)
        inside = (at < rows)[:, None] & (dim < H)[None, :]
        tile = tl.load(
            source + (at * stride)[:, None] + (head * H + dim)[None, :], mask=inside, other=0.0
        )
    return tile


@triton.jit
def _store_tile(out_ptr, value, row, rows, head, stride, ROWS: tl.constexpr, H: tl.constexpr):
    BLOCK: tl.constexpr = triton.next_power_of_2(H)
    at = row + tl.arange(0, ROWS).to(tl.int64)
    dim = tl.arange(0, BLOCK)
    inside = (at < rows)[:, None] & (dim < H)[None, :]
    where = out_ptr + (at * stride)[:, None] + (head * H + dim)[None, :]
    tl.store(where, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _bounds(lo_ptr, up_ptr, row, rows, length, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of ROWS intervals: them, and the block-aligned walk: masked left, full, masked right.

    Rows past the end see nothing: their interval is empty and sits inside every other one.
    """
    at = row + tl.arange(0, ROWS)
    inside = at < rows
    lo = tl.load(lo_ptr + at, mask=inside, other=0)
    up = tl.load(up_ptr + at, mask=inside, other=0)
    start = tl.min(tl.where(inside, lo, length), 0) // BLOCK * BLOCK
    stop = tl.max(tl.where(inside, up, 0), 0)
    stop = (stop + BLOCK - 1) // BLOCK * BLOCK
    full_start = (tl.max(tl.where(inside, lo, 0), 0) + BLOCK - 1) // BLOCK * BLOCK
    full_stop = tl.min(tl.where(inside, up, length), 0) // BLOCK * BLOCK
    stop = tl.maximum(start, stop)
    full_start = tl.minimum(full_start, stop)
    full_stop = tl.minimum(tl.maximum(full_start, full_stop), stop)
    full_start = tl.maximum(full_start, start)
    full_stop = tl.maximum(full_stop, full_start)
    return lo, up, start, full_start, full_stop, stop


@triton.jit
def _query_words(first, row, plane, key0, key1, ROWS: tl.constexpr):
    """Both row words of the dropout mask, of queries row ... row + ROWS - 1."""
    token = row + tl.arange(0, ROWS).to(tl.int64) + first
    plane = plane.to(tl.uint32)
    a = row_word(token, plane, key0.to(tl.uint32, bitcast=True))
    return a, row_word(token, plane, key1.to(tl.uint32, bitcast=True))


@triton.jit
def _key_words(first, column, key0, COLUMNS: tl.constexpr):
    """Column words of the dropout mask, of keys column ... column + COLUMNS - 1."""
    token = column + tl.arange(0, COLUMNS).to(tl.int64) + first
    return mix(token.to(tl.uint32) ^ key0.to(tl.uint32, bitcast=True))


@triton.jit
def _forward_step(
    q, k_src, v_src, acc, top, total, column, keys, head, k_stride, v_stride, lo, up, scale,
    a, b, first_key, key0, threshold, keep_scale,
    BN: tl.constexpr, H: tl.constexpr, TMA: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    k = _tile(k_src, column, keys, head, k_stride, BN, H, TMA)
    s = tl.dot(q, k.T, input_precision="ieee")
    if MASK:
        j = column + tl.arange(0, BN)
        seen = (j[None, :] >= lo[:, None]) & (j[None, :] < up[:, None])
        s = tl.where(seen, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    shift = new_top
    if MASK:
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s * scale - shift[:, None])
    keep = tl.exp2(top - shift)
    total = total * keep + tl.sum(p, 1)
    acc = acc * keep[:, None]
    if DROP:
        c = _key_words(first_key, column, key0, BN)
        p = tl.where(kept(a[:, None], b[:, None], c[None, :], threshold), p * keep_scale, 0.0)
    v = _tile(v_src, column, keys, head, v_stride, BN, H, TMA)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_top, total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _forward_kernel(
    q_src, k_src, v_src, o_ptr, lse_ptr, lo_ptr, up_ptr, queries, keys,
    q_stride, k_stride, v_stride, scale,
    first_query, first_key, first_head, key0, key1, threshold, keep_scale,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TMA: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    # longest rows first: under a causal mask late queries see most
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head = tl.program_id(1)
    kv_head = head // GROUP
    lo, up, start, full_start, full_stop, stop = _bounds(lo_ptr, up_ptr, row, queries, keys, BM, BN)
    q = _tile(q_src, row, queries, head, q_stride, BM, H, TMA)
    BLOCK: tl.constexpr = triton.next_power_of_2(H)
    acc = tl.zeros((BM, BLOCK), dtype=tl.float32)
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    a = 0
    b = 0
    if DROP:
        a, b = _query_words(first_query, row, first_head + head, key0, key1, BM)
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
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    _store_tile(o_ptr, acc, row, queries, head, N * H, BM, H)
    lse = tl.where(empty, float("-inf"), top + tl.log2(total)) * 0.6931471805599453
    at = row + tl.arange(0, BM)
    tl.store(lse_ptr + head.to(tl.int64) * queries + at, lse, mask=at < queries)


@triton.jit
def _delta_kernel(
    o_ptr, do_ptr, lse_ptr, stats_ptr, rows, o_stride, do_stride,
    N: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    o = _tile(o_ptr, row, rows, head, o_stride, ROWS, H, False).to(tl.float32)
    do = _tile(do_ptr, row, rows, head, do_stride, ROWS, H, False).to(tl.float32)
    inside = row + tl.arange(0, ROWS) < rows
    at = head.to(tl.int64) * rows + row + tl.arange(0, ROWS)
    lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
    # +inf where a row sees nothing, so that every p of the row is 0
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    tl.store(stats_ptr + at, lse, mask=inside)
    stats_ptr += tl.cast(rows, tl.int64) * N
    tl.store(stats_ptr + at, tl.sum(o * do, 1), mask=inside)


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
    k = _tile(k_src, column, keys, head, k_stride, BN, H, TMA)
    v = _tile(v_src, column, keys, head, v_stride, BN, H, TMA)
    s = tl.dot(q, k.T, input_precision="ieee")
    p = tl.exp2(s * scale - lse[:, None])
    if MASK:
        j = column + tl.arange(0, BN)
        seen = (j[None, :] >= lo[:, None]) & (j[None, :] < up[:, None])
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(do, v.T, input_precision="ieee")
    if DROP:
        c = _key_words(first_key, column, key0, BN)
        dp = tl.where(kept(a[:, None], b[:, None], c[None, :], threshold), dp * keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _dq_kernel(
    q_src, k_src, v_src, do_src, stats_ptr, dq_ptr, lo_ptr, up_ptr, queries, keys,
    q_stride, k_stride, v_stride, do_stride, scale, dq_scale,
    first_query, first_key, first_head, key0, key1, threshold, keep_scale,
    N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TMA: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head = tl.program_id(1)
    kv_head = head // GROUP
    lo, up, start, full_start, full_stop, stop = _bounds(lo_ptr, up_ptr, row, queries, keys, BM, BN)
    q = _tile(q_src, row, queries, head, q_stride, BM, H, TMA)
    do = _tile(do_src, row, queries, head, do_stride, BM, H, TMA)
    lse, delta = _row_stats(stats_ptr, head, row, queries, N, BM)
    BLOCK: tl.constexpr = triton.next_power_of_2(H)
    dq = tl.zeros((BM, BLOCK), dtype=tl.float32)
    a = 0
    b = 0
    if DROP:
        a, b = _query_words(first_query, row, first_head + head, key0, key1, BM)
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
    _store_tile(dq_ptr, dq * dq_scale, row, queries, head, N * H, BM, H)


@triton.jit
def _dkdv_step(
    k, v, dk, dv, q_src, do_src, stats_ptr, row, queries, head, q_stride, do_stride, lo, up, scale,
    c, first_query, first_head, key0, key1, threshold, keep_scale,
    N: tl.constexpr, BM: tl.constexpr, H: tl.constexpr, TMA: tl.constexpr, MASK: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """Scores are transposed here, [keys, queries]: p and ds feed the products from registers."""
    q = _tile(q_src, row, queries, head, q_stride, BM, H, TMA)
    do = _tile(do_src, row, queries, head, do_stride, BM, H, TMA)
    lse, delta = _row_stats(stats_ptr, head, row, queries, N, BM)
    s = tl.dot(k, q.T, input_precision="ieee")
    p = tl.exp2(s * scale - lse[None, :])
    if MASK:
        i = row + tl.arange(0, BM)
        seen = (i[None, :] >= lo[:, None]) & (i[None, :] < up[:, None])
        p = tl.where(seen, p, 0.0)
    if DROP:
        a, b = _query_words(first_query, row, first_head + head, key0, key1, BM)
        keep = kept(a[None, :], b[None, :], c[:, None], threshold)
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


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _dkdv_kernel(
    q_src, k_src, v_src, do_src, stats_ptr, dk_ptr, dv_ptr, lo_ptr, up_ptr, queries, keys,
    q_stride, k_stride, v_stride, do_stride, scale, dk_scale,
    first_query, first_key, first_head, key0, key1, threshold, keep_scale,
    K: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TMA: tl.constexpr, TWO_LOOPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BN
    kv_head = tl.program_id(1)
    lo, up, start, full_start, full_stop, stop = _bounds(
        lo_ptr, up_ptr, column, keys, queries, BN, BM
    )
    k = _tile(k_src, column, keys, kv_head, k_stride, BN, H, TMA)
    v = _tile(v_src, column, keys, kv_head, v_stride, BN, H, TMA)
    BLOCK: tl.constexpr = triton.next_power_of_2(H)
    dk = tl.zeros((BN, BLOCK), dtype=tl.float32)
    dv = tl.zeros((BN, BLOCK), dtype=tl.float32)
    if not TWO_LOOPS:
        full_start = stop
        full_stop = stop
    c = 0
    if DROP:
        c = _key_words(first_key, column, key0, BN)
    N: tl.constexpr = K * GROUP
    # one loop over all query heads of the group: nested loops cost registers
    left = full_start - start
    span = left + stop - full_stop
    head = kv_head * GROUP
    i = 0
    for _ in range(0, span * GROUP, BM):
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
        head = kv_head * GROUP
        row = full_start
        for _ in range(0, (full_stop - full_start) * GROUP, BM):
            dk, dv = _dkdv_step(
                k, v, dk, dv, q_src, do_src, stats_ptr, row, queries, head, q_stride, do_stride,
                lo, up, scale, c, first_query, first_head, key0, key1, threshold, keep_scale,
                N, BM, H, TMA, False, DK, DV, DROP,
            )  # fmt: skip
            row += BM
            head += tl.where(row == full_stop, 1, 0)
            row = tl.where(row == full_stop, full_start, row)
    if DK:
        _store_tile(dk_ptr, dk * dk_scale, column, keys, kv_head, K * H, BN, H)
    if DV:
        _store_tile(dv_ptr, dv, column, keys, kv_head, K * H, BN, H)


class Drop(NamedTuple):
    """Dropout of attention weights, with the mask of reference_dropout.py.

    The weight of query i, key j and head n has token first_query + i, column first_key + j and
    plane first_head + n.
    """

    p: float
    key: tuple[int, int]
    first_query: int
    first_key: int
    first_head: int = 0

    def arguments(self) -> tuple[int | float, ...]:
        """What the kernels take."""
        words = (signed_word(word) for word in self.key)
        places = (self.first_query, self.first_key, self.first_head)
        return (*places, *words, keep_threshold(self.p), 1.0 / (1.0 - self.p))


_NO_DROP = (0, 0, 0, 0, 0, 0, 1.0)


@dataclass(frozen=True)
class Tiles:
    """Rows of queries and keys a program holds at once, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int
    two_loops: bool = True


def default_tiles(kernel: str, head_dim: int, dtype: torch.dtype, tma: bool = True) -> Tiles:
    """Tiles of a kernel ("forward", "dq", "dkdv"): the largest that spill no register on sm_90.

    Loads by pointers (tma False) take more registers than descriptors. float32 runs without tensor
    cores, on small tiles; it is there for checks.
    """
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1)
    if head_dim > 128:
        return {
            "forward": Tiles(64, 64, 8, 2),
            "dq": Tiles(64, 32, 8, 2),
            "dkdv": Tiles(32, 128, 8, 2),
        }[kernel]
    if not tma:
        return {
            "forward": Tiles(128, 64, 8, 2),
            "dq": Tiles(128, 64, 8, 2),
            "dkdv": Tiles(32, 128, 8, 2),
        }[kernel]
    return {
        "forward": Tiles(128, 128, 8, 2),
        "dq": Tiles(128, 128, 8, 2),
        # Triton 3.6 spills registers with two loops (20 accesses against 0), 3.9 does not
        "dkdv": Tiles(64, 128, 8, 2, two_loops=_TRITON >= (3, 9)),
    }[kernel]


def _aligned(x: Tensor) -> bool:
    bytes_of = x.element_size()
    return x.data_ptr() % 16 == 0 and x.stride(0) * bytes_of % 16 == 0


def _flat(x_THD: Tensor) -> Tensor:
    """The 2-D view [T, heads * H] of [T, heads, H]; a copy where heads are not adjacent."""
    heads, head_dim = x_THD.shape[1:]
    adjacent = x_THD.stride(2) == 1 and (heads == 1 or x_THD.stride(1) == head_dim)
    if not adjacent:
        x_THD = x_THD.contiguous()
    return x_THD.as_strided((len(x_THD), heads * head_dim), (x_THD.stride(0), 1))


def _source(x: Tensor, rows: int, head_dim: int, tma: bool) -> Tensor | TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, head_dim]) if tma else x


def _use_tma(head_dim: int, *tensors: Tensor) -> bool:
    return head_dim == next_power_of_2(head_dim) and all(map(_aligned, tensors))


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Intervals) -> None:
    check_float("attention", q=q, k=k, v=v)
    check_same("attention", "types", q=q.dtype, k=k.dtype, v=v.dtype)
    queries, heads, head_dim = q.shape
    keys, kv_heads, _ = k.shape
    check_shape("attention", (keys, kv_heads, head_dim), k=k, v=v)
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"attention: head_dim {head_dim} is not supported by the triton kernels {HEAD_DIMS}; "
            "pad q, k and v or use kernels.backend=reference"
        )
    if heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads do not divide over {kv_heads} kv heads")
    check_shape("attention", (queries,), lo=mask.lo, up=mask.up)
    check_shape("attention", (keys,), key_lo=mask.key_lo, key_up=mask.key_up)


def _positive(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    if not scale > 0:
        raise ValueError(f"attention: scale={scale}, expected a positive number")
    return scale


def attention_forward(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    mask: Intervals,
    *,
    scale: float | None = None,
    drop: Drop | None = None,
    tiles: Tiles | None = None,
    tma: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(o[T, N, H], lse[N, T]) of T queries over S keys. Raises TypeError, ValueError.

    scale: of the scores, 1 / sqrt(H) by default. lse: float32, natural logarithm. tma: take inputs
    through descriptors (None: where alignment and H allow). drop: of the softmax's weights, which
    lse and the sums leave out of account.
    """
    _check(q_TNH, k_SKH, v_SKH, mask)
    queries, heads, head_dim = q_TNH.shape
    keys, kv_heads, _ = k_SKH.shape
    q, k, v = (_flat(x) for x in (q_TNH, k_SKH, v_SKH))
    o_TNH = q_TNH.new_empty(queries, heads, head_dim)
    lse_NT = q_TNH.new_empty(heads, queries, dtype=torch.float32)
    if not queries:
        return o_TNH, lse_NT
    if not keys:
        return o_TNH.zero_(), lse_NT.fill_(-torch.inf)
    use_tma = _use_tma(head_dim, q, k, v) if tma is None else tma
    t = tiles or default_tiles("forward", head_dim, q.dtype, use_tma)
    scale = _positive(scale, head_dim)
    _forward_kernel[(cdiv(queries, t.queries), heads)](
        _source(q, t.queries, head_dim, use_tma),
        _source(k, t.keys, head_dim, use_tma),
        _source(v, t.keys, head_dim, use_tma),
        o_TNH,
        lse_NT,
        mask.lo,
        mask.up,
        queries,
        keys,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        scale * LOG2_E,
        *(drop.arguments() if drop else _NO_DROP),
        N=heads,
        GROUP=heads // kv_heads,
        H=head_dim,
        BM=t.queries,
        BN=t.keys,
        TMA=use_tma,
        DROP=drop is not None,
        num_warps=t.warps,
        num_stages=t.stages,
        **OPTIONS,
    )
    return o_TNH, lse_NT


def attention_delta(o_TNH: Tensor, do_TNH: Tensor, lse_NT: Tensor) -> Tensor:
    """What the backward needs of each row: float32 [2, N, T] = lse in base 2, sum of o * do.

    o and lse are those of the whole softmax: for a chunk of a ring, the merged ones. lse is +inf
    where a query sees nothing.
    """
    tokens, heads, head_dim = o_TNH.shape
    check_shape("attention_delta", (tokens, heads, head_dim), do=do_TNH)
    check_shape("attention_delta", (heads, tokens), lse=lse_NT)
    o, do = _flat(o_TNH), _flat(do_TNH)
    stats_2NT = o.new_empty(2, heads, tokens, dtype=torch.float32)
    rows = max(1, 4096 // next_power_of_2(head_dim))
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
            num_warps=4,
            **OPTIONS,
        )
    return stats_2NT


def attention_backward(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    stats_2NT: Tensor,
    mask: Intervals,
    *,
    scale: float | None = None,
    drop: Drop | None = None,
    dq_tiles: Tiles | None = None,
    dkdv_tiles: Tiles | None = None,
    tma: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq[T, N, H], dk[S, K, H], dv[S, K, H]); stats from `attention_delta`, drop as forward.

    Raises TypeError, ValueError.
    """
    _check(q_TNH, k_SKH, v_SKH, mask)
    queries, heads, head_dim = q_TNH.shape
    keys, kv_heads, _ = k_SKH.shape
    check_shape("attention_backward", (queries, heads, head_dim), do=do_TNH)
    check_shape("attention_backward", (2, heads, queries), stats=stats_2NT)
    q, k, v, do = (_flat(x) for x in (q_TNH, k_SKH, v_SKH, do_TNH))
    dq_TNH = q_TNH.new_empty(queries, heads, head_dim)
    dk_SKH, dv_SKH = (k_SKH.new_empty(keys, kv_heads, head_dim) for _ in range(2))
    if not (queries and keys):
        return dq_TNH.zero_(), dk_SKH.zero_(), dv_SKH.zero_()
    use_tma = _use_tma(head_dim, q, k, v, do) if tma is None else tma
    scale = _positive(scale, head_dim)
    dropping = drop.arguments() if drop else _NO_DROP
    strides = (q.stride(0), k.stride(0), v.stride(0), do.stride(0))
    t = dq_tiles or default_tiles("dq", head_dim, q.dtype, use_tma)
    _dq_kernel[(cdiv(queries, t.queries), heads)](
        _source(q, t.queries, head_dim, use_tma),
        _source(k, t.keys, head_dim, use_tma),
        _source(v, t.keys, head_dim, use_tma),
        _source(do, t.queries, head_dim, use_tma),
        stats_2NT,
        dq_TNH,
        mask.lo,
        mask.up,
        queries,
        keys,
        *strides,
        scale * LOG2_E,
        scale,
        *dropping,
        N=heads,
        GROUP=heads // kv_heads,
        H=head_dim,
        BM=t.queries,
        BN=t.keys,
        TMA=use_tma,
        DROP=drop is not None,
        num_warps=t.warps,
        num_stages=t.stages,
        **OPTIONS,
    )
    t = dkdv_tiles or default_tiles("dkdv", head_dim, q.dtype, use_tma)
    # both sums of 256 columns do not fit in registers: each gets a pass of its own
    passes = [(True, True)] if head_dim <= 128 else [(True, False), (False, True)]
    for with_dk, with_dv in passes:
        _dkdv_kernel[(cdiv(keys, t.keys), kv_heads)](
            _source(q, t.queries, head_dim, use_tma),
            _source(k, t.keys, head_dim, use_tma),
            _source(v, t.keys, head_dim, use_tma),
            _source(do, t.queries, head_dim, use_tma),
            stats_2NT,
            dk_SKH,
            dv_SKH,
            mask.key_lo,
            mask.key_up,
            queries,
            keys,
            *strides,
            scale * LOG2_E,
            scale,
            *dropping,
            K=kv_heads,
            GROUP=heads // kv_heads,
            H=head_dim,
            BM=t.queries,
            BN=t.keys,
            TMA=use_tma,
            TWO_LOOPS=t.two_loops,
            DK=with_dk,
            DV=with_dv,
            DROP=drop is not None,
            num_warps=t.warps,
            num_stages=t.stages,
            **OPTIONS,
        )
    return dq_TNH, dk_SKH, dv_SKH


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
