"""Argument checks and grid sizes of the Triton launchers. Imports no triton.

The kernels use plain triton.language: no atomics (results are the same bits on every run), no
libdevice, no block pointers, no run-time tuning.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PROGRAMS_OFF_GPU = 4  # persistent grids without a GPU (interpreter, ahead-of-time compilation)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@lru_cache
def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n; 1 for n below 1."""
    return 1 << max(0, n - 1).bit_length()


def num_programs(device: torch.device, per_multiprocessor: int = 1) -> int:
    """Programs of a persistent grid: fixed for a device, so sums over them keep their order."""
    if device.type != "cuda":
        return _PROGRAMS_OFF_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count * per_multiprocessor


def once_per_form(check: Callable[..., None]) -> Callable[..., None]:
    """A check of tensors (or None), made once for each combination of shapes, strides and types."""
    passed: set[tuple[object, ...]] = set()

    @wraps(check)
    def run(*tensors: Tensor | None) -> None:
        forms = tuple([None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors])
        if forms not in passed:
            check(*tensors)
            passed.add(forms)

    return run


def check_float(operation: str, **tensors: Tensor | None) -> None:
    """Raise TypeError if a tensor is not of a storage type that the kernels take."""
    for name, x in tensors.items():
        if x is not None and x.dtype not in FLOATS:
            raise TypeError(
                f"{operation}: {name} is {x.dtype}; the triton kernels take float32, bfloat16 and "
                "float16; use kernels.backend=reference for other types"
            )


def check_same(operation: str, what: str, **values: object) -> None:
    """Raise ValueError if the named values differ; `what` names them in the message."""
    if len(set(values.values())) > 1:
        got = ", ".join(f"{name} has {value}" for name, value in values.items())
        raise ValueError(f"{operation}: {what} must be the same: {got}")


def check_shape(operation: str, shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    """Raise ValueError if a tensor does not have this shape."""
    for name, x in tensors.items():
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{operation}: {name} has shape {tuple(x.shape)}, expected {shape}")


def check_last_contiguous(operation: str, **tensors: Tensor | None) -> None:
    """Raise ValueError if the last dimension is not contiguous: kernels read rows at a time."""
    for name, x in tensors.items():
        if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{operation}: the last dimension of {name} has stride {x.stride(-1)}, expected 1; "
                "pass .contiguous()"
            )


def rows_readable(x: Tensor) -> Tensor:
    """x, or a copy if its last dimension is not contiguous (an expanded gradient has stride 0)."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def vector(x: Tensor | None) -> Tensor | None:
    """A vector x as kernels read it, contiguous: a copy if it is expanded or sliced."""
    return None if x is None else x.contiguous()
