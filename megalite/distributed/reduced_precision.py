"""Sums over an axis whose values are sent in a narrower type: bf16 on the wire, fp32 in the sum.

Each rank rounds its values once, one all-to-all exchanges them, and the receiver adds them in the
full type, in axis order: half the bytes, one rounding a rank, and no error that grows with the
number of ranks, as adding in bf16 would have. Works on flat buffers in place, as the reductions of
comm.py do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed import comm
from megalite.distributed.comm import Handle
from megalite.distributed.mesh import Axis


def reduce_scatter_rounded(flat: Tensor, axis: Axis, dtype: torch.dtype) -> Iterator[None]:
    """A reduce-scatter in place of 1-D `flat`, whose values are sent rounded to `dtype`, in steps.

    The first `next` starts the exchange, the second one leaves the sum, in the type of `flat`, in
    my slice; what the other slices then hold is not defined. With size 1 nothing is rounded. Raises
    ValueError if the size does not divide dim 0.
    """
    mine = comm.local_slice(flat, axis)
    if axis.size == 1 or flat.numel() == 0:
        return

    # Rounded once here; from then on the ranks' values are only added in the type of `flat`.
    sent = flat.to(dtype)
    parts = torch.empty_like(sent)
    num_bytes = sent.numel() * sent.element_size() * (axis.size - 1) / axis.size
    axis.ledger.start("reduce_scatter", axis.name, num_bytes)
    with axis.ledger.blocked(axis.name, starting=True):
        work = dist.all_to_all_single(parts, sent, group=axis.group, async_op=True)
    handle = Handle(parts, work, axis)
    yield

    first, *others = handle.wait().chunk(axis.size)
    with torch.no_grad():
        mine.copy_(first)
        for part in others:
            mine.add_(part)


def all_reduce_rounded(flat: Tensor, axis: Axis, dtype: torch.dtype) -> Iterator[None]:
    """A rounded reduce-scatter and then an all-gather of the sums, rounded, in three steps.

    At the end all ranks have the same bits in all of `flat`. All ranks must take the steps of their
    reductions in the same order, since the second one starts a collective.
    """
    yield from reduce_scatter_rounded(flat, axis, dtype)
    if axis.size > 1:
        gather = comm.start_all_gather(comm.local_slice(flat, axis).to(dtype), axis)
        yield
        flat.copy_(gather.wait())
