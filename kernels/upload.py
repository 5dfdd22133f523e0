"""From host memory to a device, without a wait of the host for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(host: Tensor, device: torch.device) -> Tensor:
    """`host` on `device`, copied on the current stream; on CPU `host` itself.

    The copy is from pinned memory, which torch gives to nobody else before it is done. From other
    memory CUDA may first wait for all that was launched.
    """
    pinned = host.pin_memory() if device.type == "cuda" else host
    return pinned.to(device, non_blocking=True)
