"""Unequal pieces to every rank of an axis and back: one all-to-all. Not differentiable."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from megalite.distributed.mesh import Axis


def exchange(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """1-D `x` cut into `sent[r]` elements for axis rank r; returns what the ranks sent here.

    `received[r]` elements come from rank r and lie in axis order. With size 1 it is `x` itself.
    """
    if axis.size == 1:
        return x
    away = sum(sent) - sent[axis.rank]
    axis.ledger.start("all_to_all", axis.name, away * x.element_size())
    out = x.new_empty(sum(received))
    with axis.ledger.blocked(axis.name):
        dist.all_to_all_single(out, x, list(received), list(sent), group=axis.group)
    return out
