"""Blocks of rows in which the reference path computes, and the types in which it sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements of a block of rows. On CPU a float32 temporary then takes 2 MiB and stays in the caches;
# on other devices a block must be enough work to be worth its launches.
_BLOCK_ELEMENTS, _LARGE_BLOCK_ELEMENTS = 1 << 19, 1 << 26


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums over tensors of type `dtype`: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def low_precision_on_cpu(x: Tensor) -> bool:
    """True if x is a 16-bit tensor on CPU, where 16-bit arithmetic is slow."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def block_elements(x: Tensor) -> int:
    """The number of elements of a block on x's device."""
    return _BLOCK_ELEMENTS if x.device.type == "cpu" else _LARGE_BLOCK_ELEMENTS


def rows_at_a_time(x_TD: Tensor) -> int:
    """The number of rows of a block of x."""
    return max(1, block_elements(x_TD) // max(1, x_TD.shape[1]))


def row_blocks(x_TD: Tensor) -> list[slice]:
    """All rows of x, block by block."""
    rows = rows_at_a_time(x_TD)
    return [slice(start, start + rows) for start in range(0, x_TD.shape[0], rows)]


def blocks_and_buffers(
    x_TD: Tensor, columns: Sequence[int], dtype: torch.dtype
) -> Iterator[tuple[slice, list[Tensor]]]:
    """(rows, buffers) of every block: a buffer [rows, n] for every n of `columns`.

    All blocks get the same buffers, so these stay in the caches; the last block's are shorter.
    """
    rows = min(len(x_TD), rows_at_a_time(x_TD))
    buffers = [x_TD.new_empty((rows, n), dtype=dtype) for n in columns]
    for block in row_blocks(x_TD):
        left = len(x_TD) - block.start
        if left < rows:
            buffers = [x[:left] for x in buffers]
        yield block, buffers
