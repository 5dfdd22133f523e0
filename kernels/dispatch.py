"""The choice of operations: plain torch, Triton, or Triton in its interpreter.

The caller that builds a model chooses once and passes the operations on as an object; nothing falls
back to another implementation later. Importing this module never imports triton.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any, Literal, get_args

import torch

from megalite.kernels.errors import BackendError
from megalite.kernels.operations import Kernels
from megalite.kernels.triton.tables import table_hash

Backend = Literal["auto", "triton", "reference", "interpret"]

CAPABILITY = (8, 0)  # the least compute capability that the kernels compile for
_STORAGE = (torch.float32, torch.bfloat16, torch.float16)


def select(
    backend: str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    attention: str = "auto",
    norm: str = "auto",
    adam: str = "auto",
) -> Kernels:
    """The operations of a backend on a device (CPU by default), for a model of a storage type.

    backend: "auto" is Triton on CUDA devices it compiles for, if it is installed and takes the
    type, and plain torch elsewhere; "interpret" is Triton's interpreter, for tests. attention
    ("sdpa_flash", "sdpa_cudnn", "fa3", "fa4"), norm and adam ("apex") take single operations from
    other packages. Raises BackendError if any of them cannot be used.
    """
    where = _device(device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise BackendError(f"kernels: the storage type is {dtype!r}, expected a floating one")
    return with_adapters(_backend(backend, where, dtype), where, attention, norm, adam)


def with_adapters(
    ops: Kernels, device: torch.device, attention: str, norm: str, adam: str
) -> Kernels:
    """`ops` with single operations of the named packages; "auto" leaves its own.

    Raises BackendError for a name that is not known, or a package that cannot be used here.
    """
    for setting, choice in (("kernels.norm", norm), ("optimizer.adam", adam)):
        if choice not in ("auto", "apex"):
            raise BackendError(f"{setting} is {choice!r}; allowed: auto, apex")

    # Each package is imported only if it is named: importing one may be slow, or may fail.
    others: dict[str, Any] = {}
    if attention != "auto":
        from megalite.kernels.others.attention import attention_adapter

        # Attention of another package checks its own head dims when it is called.
        mask, attend = attention_adapter(attention, device)
        others.update(attention_mask=mask, attention=attend, head_dims=None)
    if norm == "apex":
        from megalite.kernels.others.apex import apex_norm

        found = apex_norm(ops, device)
        others.update(norm=found.norm, norm_grad=found.norm_grad)
    if adam == "apex":
        from megalite.kernels.others.apex import apex_adamw

        others["adamw_plan"] = apex_adamw(device)

    # The name goes into the log and into checkpoints, which must show what computed the numbers.
    named = (("attention", attention), ("norm", norm), ("adam", adam))
    parts = [f"{operation}={choice}" for operation, choice in named if choice != "auto"]
    return replace(ops, name=" ".join([ops.name, *parts]), **others)


def _device(device: torch.device | str | None) -> torch.device:
    try:
        return torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise BackendError(f"kernels: {device!r} is no device: {error}") from error


def _backend(backend: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    if backend not in get_args(Backend):
        allowed = ", ".join(get_args(Backend))
        raise BackendError(f"kernels.backend is {backend!r}; allowed: {allowed}")
    if backend == "reference":
        return Kernels()
    reason = _obstacle(backend, device, dtype)
    if reason is None:
        table_hash()  # reads the table, so a broken one raises here and not in the first launch
        if backend == "interpret":
            from megalite.kernels.triton.interpreter_repairs import install

            install()
        from megalite.kernels.triton.operations import TRITON

        return replace(TRITON, name="interpret") if backend == "interpret" else TRITON
    if backend == "auto":
        return Kernels()
    raise BackendError(f"kernels.backend={backend} cannot be used: {reason}")


def _obstacle(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why Triton cannot compute here, with what to change; None if it can."""
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
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU; use reference"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        needed = ".".join(map(str, CAPABILITY))
        return f"the device's capability is {capability}, its kernels need {needed}; use reference"
    return None


def _interpreted() -> bool:
    """True if triton runs kernels in its interpreter.

    Raises BackendError if triton is installed but broken: falling back would only be slow.
    """
    try:
        from triton import knobs
    except Exception as error:
        raise BackendError(
            f"triton is installed but cannot be imported ({type(error).__name__}: {error}); "
            "install triton>=3.6, or set kernels.backend=reference"
        ) from error
    return bool(knobs.runtime.interpret)
