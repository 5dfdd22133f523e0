"""Sums over an axis whose values are sent in a narrower type: bf16 on the wire, fp32 in the sum.

Each rank rounds its values once, one all-to-all exchanges them, and the receiver adds them in the
full type, in axis order: half the bytes, one rounding a rank, and no error that grows with the
number of ranks, as adding in bf16 would have. Works on flat buffers in place, as the reductions of
comm.py do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed import comm
from megalite.distributed.comm import Handle
from megalite.distributed.mesh import Axis


def reduce_scatter_rounded(flat: Tensor, axis: Axis, dtype: torch.dtype) -> Handle:
    """Start a reduce-scatter in place of 1-D `flat`, whose values are sent rounded to `dtype`.

    `wait()` of the handle returns my slice of `flat`, a view that then holds the sum in the type of
    `flat`. What the other slices hold afterwards is not defined. With size 1 nothing is rounded.
    Raises ValueError if the size does not divide dim 0.
    """
    mine = comm.local_slice(flat, axis)
    if axis.size == 1 or flat.numel() == 0:
        return Handle(mine)

    # Rounded once here; from then on the ranks' values are only added in the type of `flat`.
    sent = flat.to(dtype)
    parts = torch.empty_like(sent)
    num_bytes = sent.numel() * sent.element_size() * (axis.size - 1) / axis.size
    axis.ledger.start("reduce_scatter", axis.name, num_bytes)
    with axis.ledger.blocked(axis.name):
        work = dist.all_to_all_single(parts, sent, group=axis.group, async_op=True)

    def add_up() -> None:
        first, *others = parts.chunk(axis.size)
        with torch.no_grad():
            mine.copy_(first)
            for part in others:
                mine.add_(part)

    return Handle(mine, work, axis, add_up)


class RoundedAllReduce:
    """An all-reduce in flight: a rounded reduce-scatter, then an all-gather of the sums, rounded.

    The all-gather starts in `wait`, so all ranks must wait in the same order. All ranks end with
    the same bits.
    """

    def __init__(self, flat: Tensor, axis: Axis, dtype: torch.dtype) -> None:
        self._flat, self._axis, self._dtype = flat, axis, dtype
        self._scatter = reduce_scatter_rounded(flat, axis, dtype)

    def wait(self) -> Tensor:
        """The sum, rounded to `dtype`, in place in all of `flat`. With size 1 `flat` itself."""
        mine = self._scatter.wait()
        if self._axis.size > 1:
            self._flat.copy_(comm.all_gather(mine.to(self._dtype), self._axis))
        return self._flat
