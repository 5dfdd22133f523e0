"""What the custom operators share: the kernels of a tensor's device, and shapes of statistics."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from megalite.kernels.dispatch import select
from megalite.kernels.operations import Kernels
from megalite.kernels.plain.blocks import sum_dtype

_AS_IT_IS = nullcontext()


@cache
def _of(device: torch.device, dtype: torch.dtype) -> Kernels:
    return select("auto", device, dtype)


def ops_of(x: Tensor) -> Kernels:
    """The operations that `select("auto")` gives for a tensor's device and type."""
    return _of(x.device, x.dtype)


def ops_of_index(x: Tensor) -> Kernels:
    """The operations of a device for a tensor of integers, for which every storage type serves."""
    return _of(x.device, torch.float32)


def stated_types(x: Tensor) -> AbstractContextManager[None]:
    """Autocast off: an operator's products are of the types it states, forward and backward."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS


def new_stats(x: Tensor, *shape: int) -> Tensor:
    """An empty tensor in the summing type of x's."""
    return x.new_empty(shape, dtype=sum_dtype(x.dtype))
