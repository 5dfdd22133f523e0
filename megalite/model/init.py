"""Initial weights as a function of (seed, global name, row), never of the layout.

Rows of a weight (its dims but the last, flattened) are drawn in fixed blocks, each from a
counter-based generator keyed by seed, name and block; a rank draws the blocks that its piece
touches and keeps its slice. The distribution is the spec's own; rows that pad a vocabulary are 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from megalite.layout.sharding import ShardSpec

_BLOCK_ROWS = 32


def init_params(
    params: Iterable[tuple[nn.Parameter, ShardSpec]], seed: int, tp: int, tp_rank: int
) -> None:
    """Fill each parameter's block in place; the same global weights at every layout."""
    with torch.no_grad():
        for param, spec in params:
            if spec.init.std == 0:
                param.fill_(spec.init.value)
                continue
            param.copy_(draw(spec, seed, tp, tp_rank))
            if spec.num_true_rows is not None:
                first = spec.local_offsets(tp, tp_rank)[0]
                param[max(0, spec.num_true_rows - first) :] = 0.0


def draw(spec: ShardSpec, seed: int, tp: int, tp_rank: int) -> Tensor:
    """This rank's block of normal(0, spec.init.std), float32 on CPU, in the spec's local shape."""
    shape = spec.local_shape(tp)
    offsets = spec.local_offsets(tp, tp_rank)
    rows = np.arange(math.prod(spec.shape[:-1])).reshape(spec.shape[:-1])
    for dim, (offset, size) in enumerate(zip(offsets[:-1], shape[:-1], strict=True)):
        rows = rows.take(range(offset, offset + size), axis=dim)
    columns = slice(offsets[-1], offsets[-1] + shape[-1])
    out = np.empty((rows.size, shape[-1]), dtype=np.float32)
    block_of, row_in_block = np.divmod(rows.ravel(), _BLOCK_ROWS)  # ascending: rows are in order
    starts = np.flatnonzero(np.diff(block_of, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], rows.size], strict=True):
        values = _block(spec, seed, int(block_of[start]))
        out[start:stop] = values[row_in_block[start:stop], columns]
    return torch.from_numpy(out).mul_(spec.init.std).view(shape)


def _block(spec: ShardSpec, seed: int, block: int) -> np.ndarray:
    digest = hashlib.sha256(f"{seed}/{spec.name}/{block}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return generator.standard_normal((_BLOCK_ROWS, spec.shape[-1]), dtype=np.float32)
