"""Products of each expert's rows with its weights in Triton: y, dx and dW of groups of rows.

    y[r] = x[r] @ W[e]^T,  dx[r] = dy[r] @ W[e],  dW[e] (+)= sum over rows r of e of dy[r]^T x[r]

W is [E, F, D]; expert e has rows offset[e] to offset[e + 1] - 1. The expert of each tile of rows is
computed on the device (`row_tiles`): the grid is an upper bound, and programs past the last tile
return at once. Rows after the last expert's are written as zeros. Sums are float32 in a fixed
order; float32 products are full float32 (`ieee`).

Operands are loaded through TMA descriptors if memory is aligned, else through masked pointers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megalite.kernels.arguments import (
    cdiv,
    check_float,
    check_last_contiguous,
    check_same,
    next_power_of_2,
    rows_readable,
)
from megalite.kernels.plain.moe import check_groups
from megalite.kernels.triton.launch import prepared
from megalite.kernels.triton.tables import OPTIONS, choose

MAX_EXPERTS = 1024
_TABLE = 8192  # elements of a table that a program holds


@prepared
@triton.jit
def _row_tiles_kernel(
    offset_ptr,
    tile_ptr,
    num_rows,
    num_tiles,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """(expert, first row, end of the expert's rows) of TILES tiles; see `row_tiles`."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    group = tl.arange(0, GROUPS)  # group E: the rows after the last expert's
    start = tl.load(offset_ptr + group, mask=group <= E, other=0)
    start = tl.where(group <= E, start, num_rows)
    stop = tl.load(offset_ptr + group + 1, mask=group < E, other=0)
    stop = tl.where(group < E, stop, num_rows)

    # tiles first ... last - 1 belong to the group
    tiles = (stop - start + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, 0)
    first = last - tiles
    mine = (tile[:, None] >= first[None, :]) & (tile[:, None] < last[None, :])
    row = start[None, :] + (tile[:, None] - first[None, :]) * ROWS

    at = tile_ptr + tile.to(tl.int64) * 3
    inside = tile < num_tiles
    # at most one group has the tile; the expert is -1 if none has
    tl.store(at, tl.sum(tl.where(mine, group[None, :] + 1, 0), 1) - 1, mask=inside)
    tl.store(at + 1, tl.sum(tl.where(mine, row, 0), 1), mask=inside)
    tl.store(at + 2, tl.sum(tl.where(mine, stop[None, :], 0), 1), mask=inside)


@triton.jit
def _load(
    source, row, column, row_stop, column_stop, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The tile [ROWS, COLUMNS] at (row, column); through pointers 0 from either stop on."""
    if TMA:
        tile = source.load([row, column])
    else:
        at = row + tl.arange(0, ROWS).to(tl.int64)
        across = column + tl.arange(0, COLUMNS)
        inside = (at < row_stop)[:, None] & (across < column_stop)[None, :]
        tile = tl.load(source + (at * stride)[:, None] + across[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _store_sums(
    out_ptr, value, row, column, rows, columns, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    at = row + tl.arange(0, ROWS).to(tl.int64)
    across = column + tl.arange(0, COLUMNS)
    inside = (at < rows)[:, None] & (across < columns)[None, :]
    out_at = out_ptr + (at * stride)[:, None] + across[None, :]
    if ACCUMULATE:
        value += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=inside)


@prepared
@triton.jit
def _grouped_rows_kernel(
    x_src, weight_src, out_ptr, tile_ptr, num_inner, num_columns,
    x_stride, weight_stride, weight_rows, out_stride,
    E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """out[rows of a tile] = x @ W[e]^T (TRANSPOSED) or x @ W[e]; a program has COLUMNS columns."""
    blocks = (num_columns + COLUMNS - 1) // COLUMNS
    # neighbouring programs load the same rows of x, and later ones the same expert's weights
    tile_at = tile_ptr + (tl.program_id(0) // blocks).to(tl.int64) * 3
    column = tl.program_id(0) % blocks * COLUMNS
    expert = tl.load(tile_at)
    if expert < 0:
        return
    row = tl.load(tile_at + 1)
    row_stop = tl.load(tile_at + 2)

    # no steps for rows after the last expert's, whose sums stay 0
    first = expert * weight_rows
    stop = first + weight_rows
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, tl.where(expert < E, num_inner, 0), INNER):
        x = _load(x_src, row, k, row_stop, num_inner, x_stride, ROWS, INNER, TMA)
        if TRANSPOSED:
            weight = _load(
                weight_src, first + column, k, stop, num_inner, weight_stride, COLUMNS, INNER, TMA
            )
            acc = tl.dot(x, weight.T, acc, input_precision="ieee")
        else:
            weight = _load(
                weight_src, first + k, column, stop, num_columns, weight_stride, INNER, COLUMNS, TMA
            )
            acc = tl.dot(x, weight, acc, input_precision="ieee")

    _store_sums(out_ptr, acc, row, column, row_stop, num_columns, out_stride, ROWS, COLUMNS, False)


@prepared
@triton.jit
def _grouped_weight_grad_kernel(
    dy_src, x_src, dy_ptr, x_ptr, out_ptr, offset_ptr, num_rows_out, num_columns,
    dy_stride, x_stride, expert_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    ACCUMULATE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A block of dW[e]: sums over the expert's rows in order, whole blocks of rows first."""
    row_blocks = (num_rows_out + ROWS - 1) // ROWS
    column_blocks = (num_columns + COLUMNS - 1) // COLUMNS
    expert = tl.program_id(0) // (row_blocks * column_blocks)
    block = tl.program_id(0) % (row_blocks * column_blocks)
    out_row = block // column_blocks * ROWS
    column = block % column_blocks * COLUMNS

    start = tl.load(offset_ptr + expert)
    stop = tl.load(offset_ptr + expert + 1)
    whole = stop
    if TMA:
        whole = start + (stop - start) // INNER * INNER
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for row in range(start, whole, INNER):
        dy = _load(dy_src, row, out_row, stop, num_rows_out, dy_stride, INNER, ROWS, TMA)
        x = _load(x_src, row, column, stop, num_columns, x_stride, INNER, COLUMNS, TMA)
        acc = tl.dot(dy.T, x, acc, input_precision="ieee")
    if TMA:
        # the last rows through pointers: a descriptor would read the next expert's rows, too
        for row in tl.range(whole, stop, INNER, num_stages=1):
            dy = _load(dy_ptr, row, out_row, stop, num_rows_out, dy_stride, INNER, ROWS, False)
            x = _load(x_ptr, row, column, stop, num_columns, x_stride, INNER, COLUMNS, False)
            acc = tl.dot(dy.T, x, acc, input_precision="ieee")

    # in halves, because the buffer's values together with all sums would take twice the registers
    out_ptr += expert.to(tl.int64) * expert_stride
    halves = tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
    left, right = tl.split(halves)
    _store_sums(
        out_ptr,
        left,
        out_row,
        column,
        num_rows_out,
        num_columns,
        out_stride,
        ROWS,
        COLUMNS // 2,
        ACCUMULATE,
    )
    column += COLUMNS // 2
    _store_sums(
        out_ptr,
        right,
        out_row,
        column,
        num_rows_out,
        num_columns,
        out_stride,
        ROWS,
        COLUMNS // 2,
        ACCUMULATE,
    )


def row_tiles(offset_E1: Tensor, num_rows: int, rows: int) -> Tensor:
    """Each expert's rows cut into tiles of `rows` rows: int32 [tiles, 3]. Raises ValueError.

    A tile is (expert, first row, end of the expert's rows); the expert is E for rows after the last
    expert's, and -1 past the last tile.
    """
    experts = len(offset_E1) - 1
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"row_tiles: {experts} experts, expected 1 to {MAX_EXPERTS}")
    # E groups and the rows after them, each with at most one tile that is not full
    num_tiles = cdiv(num_rows, rows) + experts
    tile_M3 = offset_E1.new_empty(num_tiles, 3)
    groups = next_power_of_2(experts + 1)
    tiles = _TABLE // groups
    _row_tiles_kernel[(cdiv(num_tiles, tiles),)](
        offset_E1.contiguous(),
        tile_M3,
        num_rows,
        num_tiles,
        E=experts,
        ROWS=rows,
        TILES=tiles,
        GROUPS=groups,
        num_warps=8,
        **OPTIONS,
    )
    return tile_M3


def _check(operation: str, buffer: Tensor | None = None, **operands: Tensor) -> None:
    """Raise TypeError, ValueError for operands or a buffer that the kernels do not take."""
    check_float(operation, buffer=buffer, **operands)
    check_last_contiguous(operation, buffer=buffer, **operands)
    check_same(operation, "types", **{name: x.dtype for name, x in operands.items()})


def _flat_weights(operation: str, weight_EFD: Tensor) -> Tensor:
    """The 2-D view [E * F, D]. Raises ValueError."""
    experts, rows, columns = weight_EFD.shape
    if experts > 1 and weight_EFD.stride(0) != rows * weight_EFD.stride(1):
        raise ValueError(
            f"{operation}: weights of experts lie {weight_EFD.stride(0)} elements apart, expected "
            f"{rows * weight_EFD.stride(1)}; pass .contiguous()"
        )
    if experts * rows >= 1 << 31:
        raise ValueError(f"{operation}: {experts} experts of {rows} rows are 2^31 rows or more")
    return weight_EFD.as_strided((experts * rows, columns), (weight_EFD.stride(1), 1))


def _aligned(*tensors: Tensor) -> bool:
    """True if TMA descriptors can describe the matrices: aligned rows that do not overlap."""
    return all(
        x.data_ptr() % 16 == 0
        and x.stride(0) * x.element_size() % 16 == 0
        and x.stride(0) >= x.shape[1]
        and x.numel()
        for x in tensors
    )


def _source(x: Tensor, rows: int, columns: int, tma: bool) -> Tensor | TensorDescriptor:
    """x as `_load` takes it: a descriptor of tiles [rows, columns], or x for pointers."""
    return TensorDescriptor.from_tensor(x, [rows, columns]) if tma else x


def _multiply_rows(
    operation: str,
    x: Tensor,
    weight_EFD: Tensor,
    offset_E1: Tensor,
    tma: bool | None,
    *,
    transposed: bool,
) -> Tensor:
    """x @ W[e]^T (`transposed`) or x @ W[e] for the rows of each expert e. Raises ValueError."""
    experts, out_columns, in_columns = weight_EFD.shape
    columns = out_columns if transposed else in_columns
    weight = _flat_weights(operation, weight_EFD)

    # A block that ends past the last row of an expert's weights would read the next expert's.
    use = choose("grouped_rows", float32=x.dtype == torch.float32)
    rows, block, inner = use["rows"], use["columns"], use["inner"]
    whole = transposed or out_columns % inner == 0
    if tma and not whole:
        raise ValueError(
            f"{operation}: weights of {out_columns} rows are no whole blocks of {inner}, so "
            "descriptors cannot be used; pass tma=None"
        )
    tma = (_aligned(x, weight) and whole) if tma is None else tma

    out = x.new_empty(len(x), columns)
    if not out.numel():
        return out

    tile_M3 = row_tiles(offset_E1, len(x), rows)
    weight_block = (block, inner) if transposed else (inner, block)
    _grouped_rows_kernel[(len(tile_M3) * cdiv(columns, block),)](
        _source(x, rows, inner, tma),
        _source(weight, *weight_block, tma),
        out,
        tile_M3,
        x.shape[1],
        columns,
        x.stride(0),
        weight.stride(0),
        out_columns,
        out.stride(0),
        E=experts,
        TRANSPOSED=transposed,
        TMA=tma,
        **use["launch"],
    )
    return out


def grouped_linear(
    x_RD: Tensor,
    weight_EFD: Tensor,
    offset_E1: Tensor,
    *,
    tma: bool | None = None,
) -> Tensor:
    """y[R, F] = x @ weight[e]^T for the rows of each expert e, 0 in the rows after the last.

    tma: load operands through descriptors (None: if alignment allows). Raises TypeError,
    ValueError.
    """
    operation = "grouped_linear"
    check_groups(operation, weight_EFD, offset_E1, x=(x_RD, 2))
    _check(operation, x=x_RD, weight=weight_EFD)
    return _multiply_rows(operation, x_RD, weight_EFD, offset_E1, tma, transposed=True)


def grouped_linear_input_grad(
    dy_RF: Tensor,
    weight_EFD: Tensor,
    offset_E1: Tensor,
    *,
    tma: bool | None = None,
) -> Tensor:
    """dx[R, D] = dy @ weight[e] for the rows of each expert e, 0 in the rows after the last.

    Arguments and errors as `grouped_linear`.
    """
    operation = "grouped_linear_input_grad"
    dy_RF = rows_readable(dy_RF)
    check_groups(operation, weight_EFD, offset_E1, dy=(dy_RF, 1))
    _check(operation, dy=dy_RF, weight=weight_EFD)
    return _multiply_rows(operation, dy_RF, weight_EFD, offset_E1, tma, transposed=False)


def grouped_weight_grad_(
    buffer_EFD: Tensor,
    dy_RF: Tensor,
    x_RD: Tensor,
    offset_E1: Tensor,
    *,
    accumulate: bool = True,
    tma: bool | None = None,
) -> None:
    """buffer[e] (+)= dy^T @ x over the rows of each expert e; float32 sums, rounded once.

    accumulate: add to what the buffer holds, else overwrite it (with 0 for an expert without
    rows). buffer: float32 or a storage type. Raises TypeError, ValueError.
    """
    operation = "grouped_weight_grad_"
    dy_RF, x_RD = rows_readable(dy_RF), rows_readable(x_RD)
    check_groups(operation, buffer_EFD, offset_E1, dy=(dy_RF, 1), x=(x_RD, 2))
    _check(operation, buffer_EFD, dy=dy_RF, x=x_RD)
    experts, out_columns, in_columns = buffer_EFD.shape
    if not buffer_EFD.numel():
        return

    # The program of a block of an expert's weights sums over all of the expert's rows: splitting
    # the rows over programs would need atomics or a second kernel.
    use = choose("grouped_weight_grad", float32=x_RD.dtype == torch.float32)
    rows, block, inner = use["rows"], use["columns"], use["inner"]
    tma = _aligned(dy_RF, x_RD) if tma is None else tma
    blocks = cdiv(out_columns, rows) * cdiv(in_columns, block)
    _grouped_weight_grad_kernel[(experts * blocks,)](
        _source(dy_RF, inner, rows, tma),
        _source(x_RD, inner, block, tma),
        dy_RF,
        x_RD,
        buffer_EFD,
        offset_E1.contiguous(),
        out_columns,
        in_columns,
        dy_RF.stride(0),
        x_RD.stride(0),
        buffer_EFD.stride(0),
        buffer_EFD.stride(1),
        ACCUMULATE=accumulate,
        TMA=tma,
        **use["launch"],
    )
