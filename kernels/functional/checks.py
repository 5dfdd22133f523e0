"""Checks of arguments, made before anything reaches a kernel.

They read what the host has: types, shapes, devices and numbers, never values on a GPU, which would
wait for it. Values of CPU tensors are checked too where a wrong one would go unnoticed, in the
operators, which never see traced or batched tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

STORAGE = (torch.float32, torch.bfloat16, torch.float16)
FLOATS = (*STORAGE, torch.float64)
WIDE = (torch.float32, torch.float64)
INDEX = (torch.int64, torch.int32)
PARAMETER = "a storage type, float64 only beside float64"


class Arg(NamedTuple):
    """An argument and what it has to be: a tensor, unless it is None and `optional`.

    types: those allowed, PARAMETER, or the name of an earlier argument with the same type. dims:
    the name of one with the same shape, or names of sizes; those that come again are equal, and
    "..." stands for any more. constant: it may not require a gradient, as none is computed for it.
    """

    value: object
    types: Sequence[torch.dtype] | str
    dims: str = "..."
    optional: bool = False
    constant: bool = False


def check(operation: str, **arguments: Arg) -> dict[str, int]:
    """The sizes that `dims` name. Raises TypeError, ValueError unless all are what they have to be.

    All must be on the device of the first, and carry no forward-mode tangent.
    """
    sizes: dict[str, int] = {}
    first: Tensor | None = None
    for name, (x, types, dims, optional, constant) in arguments.items():
        if x is None and optional:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{operation}: {name} is a {type(x).__name__}, expected a tensor")
        first = x if first is None else first
        _check_type(operation, name, x, _allowed(types, first, arguments))
        other = arguments[dims].value if dims in arguments else None
        named = dims.split(", ")
        if not (x.shape == other.shape if isinstance(other, Tensor) else _fits(x, named, sizes)):
            wanted = other.shape if isinstance(other, Tensor) else [sizes.get(d, d) for d in named]
            raise ValueError(
                f"{operation}: {name} has shape {tuple(x.shape)}, expected "
                f"({', '.join(map(str, wanted))})"
            )
        if x.device != first.device:
            raise ValueError(
                f"{operation}: {name} is on {x.device}, the first tensor on {first.device}; move "
                "one"
            )
        _check_gradient(operation, name, x, constant)
    return sizes


def _allowed(
    types: Sequence[torch.dtype] | str, first: Tensor, arguments: dict[str, Arg]
) -> Sequence[torch.dtype]:
    if types == PARAMETER:
        return FLOATS if first.dtype == torch.float64 else STORAGE
    if isinstance(types, str):
        other = arguments[types].value
        return (other.dtype,) if isinstance(other, Tensor) else FLOATS
    return types


def _check_type(operation: str, name: str, x: Tensor, types: Sequence[torch.dtype]) -> None:
    if x.dtype not in types:
        raise TypeError(f"{operation}: {name} is {x.dtype}, expected {names(types)}; cast it")
    if x.layout != torch.strided:
        raise TypeError(f"{operation}: {name} is {x.layout}, expected dense; pass .to_dense()")


def names(types: Sequence[torch.dtype]) -> str:
    """Types as a message lists them."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in types)


def _fits(x: Tensor, dims: list[str], sizes: dict[str, int]) -> bool:
    """True if x has these dims; enters the sizes that are new."""
    shape: Sequence[int] = x.shape
    if dims[0] == "...":
        dims = dims[1:]
        shape = shape[max(0, len(shape) - len(dims)) :]
    if len(shape) != len(dims):
        return False
    for size, dim in zip(shape, dims, strict=True):
        wanted = int(dim) if dim.isdigit() else sizes.get(dim, size)
        if size != wanted:
            return False
    sizes.update(zip(dims, shape, strict=True))
    return True


def _check_gradient(operation: str, name: str, x: Tensor, constant: bool) -> None:
    """Raise ValueError for a gradient or a tangent that the operation does not compute."""
    if constant and x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{operation}: {name} requires a gradient, and this operation computes none for it; "
            f"pass {name}.detach()"
        )
    # Without a rule of its own torch takes a tangent of zeros, and the result would be wrong.
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise ValueError(
            f"{operation}: {name} carries a forward-mode tangent (jvp), which has no rule here; "
            "use backward, or torch.autograd.grad"
        )


def check_range(
    operation: str, name: str, value: float, low: float, high: float, *, last: bool = False
) -> None:
    """Raise TypeError, ValueError unless low <= value < high; with `last` high is allowed, too."""
    try:
        inside = low <= value < high or (last and value == high)
    except TypeError as error:
        raise TypeError(f"{operation}: {name} is {value!r}, expected a number") from error
    if not inside:  # NaN is inside nothing
        bound = f"below {high:g}" if not last else f"to {high:g}"
        expected = f"{low:g} or more" if high == math.inf else f"{low:g} {bound}"
        raise ValueError(f"{operation}: {name}={value}, expected {expected}")


def check_indices(
    operation: str, name: str, index: Tensor, size: int, ignored: int | None = None
) -> None:
    """Raise ValueError if an index on a CPU is outside 0 ... size - 1 and not `ignored`."""
    if index.device.type != "cpu" or not index.numel():
        return
    least, largest = index.aminmax()
    if least >= 0 and largest < size:
        return
    wrong = (index < 0) | (index >= size)
    if ignored is not None:
        wrong &= index != ignored
    if wrong.any():
        at = int(wrong.nonzero()[0, 0])
        besides = "" if ignored is None else f" or ignore_index={ignored}"
        raise ValueError(
            f"{operation}: {name}[{at}] is {int(index[at])}, expected 0 to {size - 1}{besides}"
        )
