"""The gradient of an embedding in Triton: sums of rows by token, straight into the table's buffer.

Tokens are sorted by their row of the table. The program at the first place of a run of equal rows
sums the run, in a fixed order, and adds it to the buffer; programs at other places return. So no
table is made for one microbatch, rows that do not come are not touched, there are no atomics, and
results are the same bits on every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.arguments import cdiv, check_float, check_shape, rows_readable
from megalite.kernels.triton.launch import prepared
from megalite.kernels.triton.tables import choose


@prepared
@triton.jit
def _embedding_grad_kernel(
    buffer_ptr,
    dy_ptr,
    row_ptr,
    token_ptr,
    num_tokens,
    num_rows,
    dy_stride,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    place = tl.program_id(0)
    row = tl.load(row_ptr + place)
    before = tl.load(row_ptr + place - 1, mask=place > 0, other=-1)
    if (row >= 0) & (row < num_rows) & (row != before):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < D
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        full = 1
        while full > 0:
            at = place + tl.arange(0, ROWS)
            mine = tl.load(row_ptr + at, mask=at < num_tokens, other=-1) == row
            token = tl.load(token_ptr + at, mask=mine, other=0)
            dy_at = (token * dy_stride)[:, None] + column[None, :]
            dy = tl.load(dy_ptr + dy_at, mask=mine[:, None] & inside[None, :], other=0.0)
            total += dy.to(tl.float32)
            place += ROWS
            full = tl.min(mine.to(tl.int32), 0)  # 0 where the run ends among these
        out = buffer_ptr + row * D + column
        tl.store(out, tl.load(out, mask=inside, other=0.0) + tl.sum(total, 0), mask=inside)


def embedding_grad_(buffer_vD: Tensor, dy_TD: Tensor, row_T: Tensor) -> None:
    """Add dy's rows to the buffer's: `plain.products.embedding_grad_`; the buffer is float32.

    Raises TypeError, ValueError.
    """
    tokens, columns = dy_TD.shape
    check_float("embedding_grad", dy=dy_TD)
    check_shape("embedding_grad", (len(buffer_vD), columns), buffer=buffer_vD)
    check_shape("embedding_grad", (tokens,), row=row_T)
    if buffer_vD.dtype != torch.float32 or row_T.dtype != torch.int64:
        raise TypeError(
            f"embedding_grad: buffer is {buffer_vD.dtype}, row {row_T.dtype}; expected "
            "torch.float32 and torch.int64"
        )
    if not buffer_vD.is_contiguous():
        raise ValueError(
            f"embedding_grad: buffer has strides {buffer_vD.stride()}, expected contiguous rows"
        )

    # A stable sort keeps the order of the tokens within a run, and so the bits of its sum.
    dy_TD, use = rows_readable(dy_TD), choose("embedding_grad")
    if dy_TD.numel() and len(buffer_vD):
        sorted_T, token_T = torch.sort(row_T, stable=True)
        _embedding_grad_kernel[(tokens, cdiv(columns, use["columns"]))](
            buffer_vD,
            dy_TD,
            sorted_T,
            token_T,
            tokens,
            len(buffer_vD),
            dy_TD.stride(0),
            D=columns,
            **use["launch"],
        )
