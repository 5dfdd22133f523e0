"""Blocks of rows in which the reference path works, and the types in which it sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements of a block of rows: on CPU temporaries stay near 2 MiB of float32, inside the caches;
# elsewhere a block is enough work to start for.
_BLOCK_ELEMENTS, _LARGE_BLOCK_ELEMENTS = 1 << 19, 1 << 26


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over tensors of a type are kept in: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def low_precision_on_cpu(x: Tensor) -> bool:
    """Whether x is of 16 bits where no 16-bit arithmetic is quick."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def block_elements(x: Tensor) -> int:
    """How many elements are worked on at a time."""
    return _BLOCK_ELEMENTS if x.device.type == "cpu" else _LARGE_BLOCK_ELEMENTS


def rows_at_a_time(x_TD: Tensor) -> int:
    """How many rows of x a block has."""
    return max(1, block_elements(x_TD) // max(1, x_TD.shape[1]))


def row_blocks(x_TD: Tensor) -> list[slice]:
    """All rows of x, block by block."""
    rows = rows_at_a_time(x_TD)
    return [slice(start, start + rows) for start in range(0, x_TD.shape[0], rows)]


def blocks_and_room(
    x_TD: Tensor, columns: Sequence[int], dtype: torch.dtype
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Blocks of rows, and [rows, n] for every n of `columns` to work in.

    What a block is worked on in lies where the last one's did, so that it stays in the caches.
    """
    rows = min(len(x_TD), rows_at_a_time(x_TD))
    room = [x_TD.new_empty((rows, n), dtype=dtype) for n in columns]
    for block in row_blocks(x_TD):
        left = len(x_TD) - block.start
        if left < rows:
            room = [x[:left] for x in room]
        yield block, room
