"""Initial weights as a function of (seed, global name, row), never of the layout.

Rows of a weight (its dims but the last, flattened) are drawn 32 at a time, each time from a
counter-based generator keyed by seed, name and number; a rank makes the draws that its block
touches and keeps its slice. The distribution is the spec's own; rows that pad a vocabulary are 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from megalite.distributed.mesh import Axis
from megalite.layout.sharding import ShardSpec
from megalite.layout.topology import Kind

_ROWS_PER_DRAW = 32


def init_params(
    params: Iterable[tuple[nn.Parameter, ShardSpec]], seed: int, axis_of: Callable[[Kind], Axis]
) -> None:
    """Fill each parameter's block in place; the same global weights at every layout.

    `axis_of` gives the axis of a kind (`Mesh.axis`), of which each spec's grid names its own.
    """
    with torch.no_grad():
        for param, spec in params:
            if spec.init.std == 0:
                param.fill_(spec.init.value)
                continue
            axis = axis_of(spec.grid.cut_axis)
            param.copy_(draw(spec, seed, axis.size, axis.rank))
            if spec.num_true_rows is not None:
                first = spec.local_offsets(axis.size, axis.rank)[0]
                param[max(0, spec.num_true_rows - first) :] = 0.0


def draw(spec: ShardSpec, seed: int, num_blocks: int, block: int) -> Tensor:
    """Block number `block` of normal(0, spec.init.std), float32 on CPU, in the local shape."""
    shape, offsets = spec.local_shape(num_blocks), spec.local_offsets(num_blocks, block)

    # The global numbers of this block's rows, ascending, and which draw each of them is from.
    rows = np.arange(math.prod(spec.shape[:-1])).reshape(spec.shape[:-1])
    for dim, (offset, size) in enumerate(zip(offsets[:-1], shape[:-1], strict=True)):
        rows = rows.take(range(offset, offset + size), axis=dim)
    draw_of, row_in_draw = np.divmod(rows.ravel(), _ROWS_PER_DRAW)

    # Every draw that the block touches is made whole, so that its values depend on no layout.
    columns = slice(offsets[-1], offsets[-1] + shape[-1])
    out = np.empty((rows.size, shape[-1]), dtype=np.float32)
    starts = np.flatnonzero(np.diff(draw_of, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], rows.size], strict=True):
        values = _draw_rows(spec, seed, int(draw_of[start]))
        out[start:stop] = values[row_in_draw[start:stop], columns]
    return torch.from_numpy(out).mul_(spec.init.std).view(shape)


def _draw_rows(spec: ShardSpec, seed: int, number: int) -> np.ndarray:
    digest = hashlib.sha256(f"{seed}/{spec.name}/{number}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return generator.standard_normal((_ROWS_PER_DRAW, spec.shape[-1]), dtype=np.float32)
