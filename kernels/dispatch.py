"""Which operations to use: plain torch, Triton, or Triton in its interpreter.

The choice is made once, by whoever builds a model, and passed on as an object; nothing falls back
to other numbers on the way. Importing this module never imports triton.
"""

from __future__ import annotations

import importlib.util
from typing import Literal, get_args

import torch
from megalite.kernels.adapted import with_adapters
from megalite.kernels.errors import BackendError
from megalite.kernels.operations import Kernels

Backend = Literal["auto", "triton", "reference", "interpret"]

CAPABILITY = (8, 0)  # the oldest the kernels compile for
_STORAGE = (torch.float32, torch.bfloat16, torch.float16)


def select(
    backend: str = "auto",
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    attention: str = "auto",
    norm: str = "auto",
    adam: str = "auto",
) -> Kernels:
    """The operations of a backend on a device (CPU by default), for a model of a storage type.

    auto: Triton on CUDA devices it compiles for, where it is installed and has the type; plain
    torch elsewhere. interpret: Triton's interpreter, for tests. attention ("sdpa_flash",
    "sdpa_cudnn", "fa3", "fa4"), norm and adam ("apex") take single operations from elsewhere. All
    of it is there or refused. Raises BackendError.
    """
    where = device or torch.device("cpu")
    return with_adapters(_backend(backend, where, dtype), where, attention, norm, adam)


def _backend(backend: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    if backend not in get_args(Backend):
        allowed = ", ".join(get_args(Backend))
        raise BackendError(f"kernels.backend is {backend!r}; allowed: {allowed}")
    if backend == "reference":
        return Kernels()
    reason = _obstacle(backend, device, dtype)
    if reason is None:
        if backend == "interpret":
            from megalite.kernels.interpreter import install

            install()
        from megalite.kernels.triton_operations import TritonKernels

        return TritonKernels("interpret" if backend == "interpret" else "triton")
    if backend == "auto":
        return Kernels()
    raise BackendError(f"kernels.backend={backend} cannot be used: {reason}")


def _obstacle(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton cannot compute here, and what to change."""
    if dtype not in _STORAGE:
        return f"its kernels take float32, bfloat16 and float16, not {dtype}; use reference"
    if backend != "interpret" and device.type != "cuda":
        return f"the device is {device.type}, triton needs cuda; use auto or reference"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install triton>=3.6, or use reference"
    interpreted = _interpreted()
    if backend == "interpret":
        if interpreted:
            return None
        return "TRITON_INTERPRET=1 must be set before triton is imported; or use reference"
    if interpreted:
        return "TRITON_INTERPRET=1 is set; unset it, or use interpret"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        needed = ".".join(map(str, CAPABILITY))
        return f"the device's capability is {capability}, its kernels need {needed}; use reference"
    return None


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
