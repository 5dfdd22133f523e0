"""Rows of a mixture of experts in Triton: sorting by expert, permute and unpermute with gradients.

The functions are defined in `plain.moe`; `expert_rows` gives the same bits. The sort is a counting
sort of blocks: counts of each chunk of copies, their running sums over chunks, then the rank of a
copy among those before it in its chunk. The host reads no values, and shapes are fixed.

One program reads a token's row once and writes it to its K rows, or sums it from them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.arguments import (
    cdiv,
    check_float,
    check_last_contiguous,
    check_same,
    check_shape,
    next_power_of_2,
    rows_readable,
)
from megalite.kernels.plain.moe import RowMap, check_experts, check_rows, check_weight
from megalite.kernels.triton.launch import prepared
from megalite.kernels.triton.tables import OPTIONS, choose

MAX_EXPERTS = 1024
MAX_COPIES_OF_TOKEN = 64  # loops over a token's copies are unrolled
_CHUNK = 1024  # copies that are counted together
_BLOCK = 128  # copies that a program ranks
_OTHERS = 32  # copies that they are compared with at a time
_TABLE = 8192  # elements of a table that a program holds


@prepared
@triton.jit
def _expert_count_kernel(
    expert_ptr,
    count_ptr,
    num_copies,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """count[chunk, e]: the copies of expert e in a chunk."""
    chunk = tl.program_id(0)
    column = tl.arange(0, EXPERTS)
    count = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(chunk * CHUNK, chunk * CHUNK + CHUNK, BLOCK):
        copy = first + tl.arange(0, BLOCK)
        expert = tl.load(expert_ptr + copy, mask=copy < num_copies, other=-1)
        count += tl.sum((expert[:, None] == column[None, :]).to(tl.int32), 0)
    tl.store(count_ptr + chunk.to(tl.int64) * E + column, count, mask=column < E)


@prepared
@triton.jit
def _expert_scan_kernel(
    count_ptr,
    before_ptr,
    offset_ptr,
    num_chunks,
    E: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """before[chunk, e]: the copies of e in earlier chunks (e = E: dropped ones); and offset[e]."""
    column = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, num_chunks, ROWS):
        chunk = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (chunk < num_chunks)[:, None] & (column < E)[None, :]
        count = tl.load(count_ptr + (chunk * E)[:, None] + column[None, :], mask=inside, other=0)
        before = total[None, :] + tl.cumsum(count, 0) - count
        at = before_ptr + chunk * STRIDE
        tl.store(at[:, None] + column[None, :], before, mask=inside)
        # copies before the chunk that have no expert were dropped
        dropped = chunk * CHUNK - tl.sum(before, 1)
        tl.store(at + E, dropped.to(tl.int32), mask=chunk < num_chunks)
        total += tl.sum(count, 0)

    tl.store(offset_ptr, 0)
    tl.store(offset_ptr + 1 + column, tl.cumsum(total, 0), mask=column < E)


@triton.jit
def _keys(expert_ptr, copy, num_copies, E: tl.constexpr):
    """The experts of copies, E for dropped ones."""
    expert = tl.load(expert_ptr + copy, mask=copy < num_copies, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@prepared
@triton.jit
def _expert_place_kernel(
    expert_ptr,
    before_ptr,
    offset_ptr,
    row_ptr,
    num_copies,
    E: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """row[copy] = offset of its expert + copies of it in earlier chunks + rank in the chunk."""
    start = tl.program_id(0) * BLOCK
    chunk = start // CHUNK
    copy = start + tl.arange(0, BLOCK)
    key = _keys(expert_ptr, copy, num_copies, E)

    # all pairs, in pieces: a chunk is small, and this needs no order between programs
    rank = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(chunk * CHUNK, start + BLOCK, OTHERS):
        other = first + tl.arange(0, OTHERS)
        other_key = _keys(expert_ptr, other, num_copies, E)
        earlier = (key[:, None] == other_key[None, :]) & (other[None, :] < copy[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)

    row = rank + tl.load(offset_ptr + key)
    row += tl.load(before_ptr + chunk.to(tl.int64) * STRIDE + key)
    tl.store(row_ptr + copy, tl.where(key < E, row, -1 - row), mask=copy < num_copies)


@prepared
@triton.jit
def _permute_kernel(
    x_ptr, row_ptr, y_ptr, num_columns, x_stride, y_stride, K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        value = tl.where(row >= 0, x, 0.0)
        row = tl.where(row >= 0, row, -1 - row)
        tl.store(y_ptr + row * y_stride + column, value.to(y_ptr.dtype.element_ty), mask=inside)


@prepared
@triton.jit
def _unpermute_kernel(
    y_ptr,
    row_ptr,
    weight_ptr,
    out_ptr,
    num_columns,
    y_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns

    # in the order of the copies, so that the sum has the same bits on every run
    out = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        y = tl.load(y_ptr + row * y_stride + column, mask=inside & (row >= 0), other=0.0)
        y = y.to(tl.float32)
        if WEIGHT:
            # masked after the product: the weight of a dropped copy may be infinite or NaN
            weight = tl.load(weight_ptr + token * K + k).to(tl.float32)
            y = tl.where(row >= 0, y * weight, 0.0)
        out += y

    tl.store(out_ptr + token * out_stride + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@prepared
@triton.jit
def _unpermute_grad_kernel(
    dout_ptr,
    y_ptr,
    row_ptr,
    weight_ptr,
    dy_ptr,
    dweight_ptr,
    num_columns,
    dout_stride,
    y_stride,
    dy_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(K):
        signed_row = tl.load(row_ptr + token * K + k).to(tl.int64)
        kept = signed_row >= 0

        # rows of dropped copies are written, too: their gradient is 0
        row = tl.where(kept, signed_row, -1 - signed_row)
        weight = tl.load(weight_ptr + token * K + k).to(tl.float32)
        product = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, num_columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < num_columns
            dout = tl.load(dout_ptr + token * dout_stride + column, mask=inside, other=0.0)
            dout = dout.to(tl.float32)
            y = tl.load(y_ptr + row * y_stride + column, mask=inside & kept, other=0.0)
            product += tl.where(kept, dout * y.to(tl.float32), 0.0)
            dy = tl.where(kept, dout * weight, 0.0)
            tl.store(dy_ptr + row * dy_stride + column, dy.to(dy_ptr.dtype.element_ty), mask=inside)

        dweight = tl.sum(product, 0)
        tl.store(dweight_ptr + token * K + k, dweight.to(dweight_ptr.dtype.element_ty))


def expert_rows(expert_TK: Tensor, num_experts: int) -> RowMap:
    """The map that sorts copies of tokens by expert. Raises TypeError, ValueError."""
    check_experts("expert_rows", expert_TK, num_experts, MAX_EXPERTS)
    copies = expert_TK.numel()
    row_TK = expert_TK.new_empty(expert_TK.shape, dtype=torch.int32)
    offset_E1 = row_TK.new_empty(num_experts + 1)
    if not copies:
        return RowMap(row_TK, offset_E1.zero_())

    # Tables over experts are padded to a power of two, and a program holds at most _TABLE elements.
    expert_TK = expert_TK.contiguous()
    chunks, table = cdiv(copies, _CHUNK), next_power_of_2(num_experts)
    count_CE = row_TK.new_empty(chunks, num_experts)
    # E + 1 counts, in rows that start at multiples of 16 bytes
    before_CE1 = row_TK.new_empty(chunks, num_experts // 4 * 4 + 4)
    _expert_count_kernel[(chunks,)](
        expert_TK,
        count_CE,
        copies,
        E=num_experts,
        CHUNK=_CHUNK,
        BLOCK=min(_CHUNK, _TABLE // table),
        EXPERTS=table,
        num_warps=4,
        **OPTIONS,
    )

    # One program sums over all chunks: a chunk's rows start where those of earlier chunks end.
    _expert_scan_kernel[(1,)](
        count_CE,
        before_CE1,
        offset_E1,
        chunks,
        E=num_experts,
        CHUNK=_CHUNK,
        STRIDE=before_CE1.shape[1],
        ROWS=min(64, _TABLE // table),
        EXPERTS=table,
        num_warps=8,
        **OPTIONS,
    )

    _expert_place_kernel[(cdiv(copies, _BLOCK),)](
        expert_TK,
        before_CE1,
        offset_E1,
        row_TK,
        copies,
        E=num_experts,
        CHUNK=_CHUNK,
        STRIDE=before_CE1.shape[1],
        BLOCK=_BLOCK,
        OTHERS=min(_BLOCK, _OTHERS),
        num_warps=8,
        **OPTIONS,
    )
    return RowMap(row_TK, offset_E1)


def _check(operation: str, rows: RowMap, **tensors: Tensor | None) -> tuple[int, int, int]:
    """(T, K, D) of a map and matrices. Raises TypeError, ValueError."""
    tokens, copies = check_rows(operation, rows)
    if copies > MAX_COPIES_OF_TOKEN:
        raise ValueError(
            f"{operation}: {copies} experts a token; the triton kernel takes 1 to "
            f"{MAX_COPIES_OF_TOKEN}; use kernels.backend=reference for more"
        )
    given = {name: x for name, x in tensors.items() if x is not None}
    check_float(operation, **given)
    check_last_contiguous(operation, **given)
    check_same(operation, "types", **{name: x.dtype for name, x in given.items()})
    columns = next(iter(given.values())).shape[-1]
    return tokens, copies, columns


def permute(x_TD: Tensor, rows: RowMap) -> Tensor:
    """y[R, D]: each copy of a token in its row, 0 in dropped rows. Raises TypeError, ValueError."""
    tokens, copies, columns = _check("permute", rows, x=x_TD)
    check_shape("permute", (tokens, columns), x=x_TD)
    y_RD = x_TD.new_empty(tokens * copies, columns)
    if y_RD.numel():
        use = choose("permute")
        _permute_kernel[(tokens, cdiv(columns, use["block"]))](
            x_TD,
            rows.row_TK.contiguous(),
            y_RD,
            columns,
            x_TD.stride(0),
            y_RD.stride(0),
            K=copies,
            **use["launch"],
        )
    return y_RD


def unpermute(y_RD: Tensor, rows: RowMap, weight_TK: Tensor | None = None) -> Tensor:
    """out[T, D]: the sum of a token's rows, times its router weights if given.

    Summed in float32, copy by copy, and rounded once. Raises TypeError, ValueError.
    """
    y_RD = rows_readable(y_RD)
    tokens, copies, columns = _check("unpermute", rows, y=y_RD)
    check_shape("unpermute", (tokens * copies, columns), y=y_RD)
    check_weight("unpermute", rows, weight_TK)
    check_float("unpermute", weight=weight_TK)

    # An empty grid cannot be launched.
    out_TD = y_RD.new_empty(tokens, columns)
    if out_TD.numel():
        use = choose("unpermute")
        _unpermute_kernel[(tokens, cdiv(columns, use["block"]))](
            y_RD,
            rows.row_TK.contiguous(),
            None if weight_TK is None else weight_TK.contiguous(),
            out_TD,
            columns,
            y_RD.stride(0),
            out_TD.stride(0),
            K=copies,
            WEIGHT=weight_TK is not None,
            **use["launch"],
        )
    return out_TD


def unpermute_grad(
    dout_TD: Tensor, y_RD: Tensor, rows: RowMap, weight_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of a weighted `unpermute`: (dy[R, D], dweight[T, K] in weight's dtype).

    Raises TypeError, ValueError.
    """
    operation = "unpermute_grad"
    dout_TD = rows_readable(dout_TD)
    tokens, copies, columns = _check(operation, rows, y=y_RD, dout=dout_TD)
    check_shape(operation, (tokens * copies, columns), y=y_RD)
    check_shape(operation, (tokens, columns), dout=dout_TD)
    check_weight(operation, rows, weight_TK)
    check_float(operation, weight=weight_TK)

    # The kernel writes every row of dy, dropped ones included, so it needs no zeros before.
    dy_RD = y_RD.new_empty(tokens * copies, columns)
    dweight_TK = weight_TK.new_empty(tokens, copies)
    if tokens:
        use = choose("unpermute_grad", columns=columns)
        _unpermute_grad_kernel[(tokens,)](
            dout_TD,
            y_RD,
            rows.row_TK.contiguous(),
            weight_TK.contiguous(),
            dy_RD,
            dweight_TK,
            columns,
            dout_TD.stride(0),
            y_RD.stride(0),
            dy_RD.stride(0),
            K=copies,
            **use["launch"],
        )
    return dy_RD, dweight_TK
