"""Shared by the custom operators: their definition, the kernels of a device, empty statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.library import custom_op

from megalite.kernels.dispatch import select
from megalite.kernels.operations import Kernels
from megalite.kernels.plain.blocks import sum_dtype

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

_AS_IT_IS = nullcontext()


class Operator(Protocol[P, R_co]):
    """A custom operator of torch, called like the function that defines it."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def register_fake(self, function: Callable[P, Any], /) -> object:
        """Take `function` for the shapes and types of the results."""
        ...

    def register_autograd(
        self, backward: Callable[..., Any], /, *, setup_context: Callable[..., None]
    ) -> None:
        """Take `backward` for the gradient, of what `setup_context` keeps of a call."""
        ...


def operator(
    name: str, *, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[P, R_co]], Operator[P, R_co]]:
    """A decorator that makes `torch.ops.megalite.*` of a function and keeps its signature.

    torch.library.custom_op itself returns an object whose call is untyped.
    """

    def define(function: Callable[P, R_co]) -> Operator[P, R_co]:
        return cast("Operator[P, R_co]", custom_op(name, function, mutates_args=mutates_args))

    return define


@cache
def _of(device: torch.device, dtype: torch.dtype) -> Kernels:
    return select("auto", device, dtype)


def ops_of(x: Tensor) -> Kernels:
    """The operations that `select("auto")` gives for a tensor's device and type."""
    return _of(x.device, x.dtype)


def ops_of_index(x: Tensor) -> Kernels:
    """The operations of a device for a tensor of integers; they do not depend on a storage type."""
    return _of(x.device, torch.float32)


def stated_types(x: Tensor) -> AbstractContextManager[None]:
    """A context without autocast: an operator's products have the types that it documents.

    For the operators of the forward and of the backward pass.
    """
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS


def new_stats(x: Tensor, *shape: int) -> Tensor:
    """An empty tensor in the summing type of x's."""
    return x.new_empty(shape, dtype=sum_dtype(x.dtype))
