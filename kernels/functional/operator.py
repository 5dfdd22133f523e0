"""The maker of custom operators: from a schema, a function of the kernels, the form of the results.

A gradient is an operator or a function. The names of its arguments are what it needs: `dNAME` is
the gradient of the result NAME; NAME an argument or a result, which is kept from the forward;
`wants_NAME` True if the argument NAME requires a gradient. A result whose gradient it does not name
has none. It gives gradients of arguments: an operator's results are named `dNAME`, a function
returns them by these names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.library import custom_op

from megalite.kernels.arguments import rows_readable
from megalite.kernels.dispatch import select
from megalite.kernels.operations import Kernels
from megalite.kernels.plain.blocks import sum_dtype

Operator = Callable[..., Any]


@cache
def _of(device: torch.device, dtype: torch.dtype) -> Kernels:
    return select("auto", device, dtype)


def operator(
    schema: str,
    compute: str | Callable[..., Any],
    empty: Callable[..., Any],
    gradient: Callable[..., Any] | None = None,
    *,
    mutates: Sequence[str] = (),
) -> Operator:
    """`torch.ops.megalite.NAME` of a schema "NAME(...) -> ...", in which results have names, too.

    compute: the field of `Kernels` that takes the arguments, or a function that is given the
    kernels for the first tensor, too; it sees no autocast, so that products have the types that are
    documented. empty: tensors of the results' shapes, types and strides, given the arguments. A
    result may be None: it becomes an empty one.
    """
    name, _, arguments = schema.partition("(")

    def run(x: Tensor, *others: Any) -> Any:
        # Kernels of integers do not depend on a storage type.
        ops = _of(x.device, x.dtype if x.is_floating_point() else torch.float32)
        call = getattr(ops, compute) if isinstance(compute, str) else partial(compute, ops)
        if not torch.is_autocast_enabled(x.device.type):
            return _present(x, call(x, *others))
        with torch.autocast(x.device.type, enabled=False):
            return _present(x, call(x, *others))

    made = custom_op(f"megalite::{name}", run, mutates_args=mutates, schema=f"({arguments}")
    made.register_fake(lambda x, *others: _present(x, empty(x, *others)))
    if gradient is not None:
        _differentiate(made, gradient)
    return made


def _present(x: Tensor, results: Any) -> Any:
    """The results of an operator, which may not be None, nor a tuple of another kind."""
    if not isinstance(results, tuple):
        return results
    return tuple(new_stats(x, 0) if result is None else result for result in results)


def _names(made: Any) -> tuple[list[str], list[str]]:
    """The names of an operator's arguments and results."""
    schema = made._opoverload._schema
    return [x.name for x in schema.arguments], [x.name for x in schema.returns]


def _differentiate(made: Any, gradient: Any) -> None:
    """Register a gradient, an operator or a function, by the names of its arguments.

    A name is that of an argument or result of `made`, "d" and a result, or "wants_" and an
    argument.
    """
    arguments, results = _names(made)
    if isinstance(gradient, CustomOpDef):
        needed, given = _names(gradient)
    else:
        needed, given = list(inspect.signature(gradient).parameters), None

    def keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        known = dict(zip((*arguments, *results), (*inputs, *outputs), strict=True))
        ctx.kept = {name: known[name] for name in needed if name in known}
        ctx.tensors = [name for name, x in ctx.kept.items() if isinstance(x, Tensor)]
        ctx.save_for_backward(*(ctx.kept.pop(name) for name in ctx.tensors))
        ctx.types = [x.dtype if isinstance(x, Tensor) else None for x in inputs]
        ctx.mark_non_differentiable(*(known[name] for name in results if f"d{name}" not in needed))

    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        known = {**ctx.kept, **dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))}
        for name, dout in zip(results, douts, strict=True):
            known[f"d{name}"] = None if dout is None else rows_readable(dout)
        for name, wanted in zip(arguments, ctx.needs_input_grad, strict=True):
            known[f"wants_{name}"] = wanted
        found = gradient(*(known[name] for name in needed))
        if given is not None:
            found = dict(zip(given, found if len(given) > 1 else (found,), strict=True))
        return tuple(
            found[f"d{name}"].to(dtype) if wanted and dtype is not None else None
            for name, dtype, wanted in zip(arguments, ctx.types, ctx.needs_input_grad, strict=True)
        )

    made.register_autograd(backward, setup_context=keep)


def rows(x: Tensor) -> Tensor:
    """The view [rows, columns] of any number of dims; a copy if rows are not contiguous."""
    if x.dim() != 2:
        x = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    return rows_readable(x)


def new(x: Tensor, *shape: int) -> Tensor:
    """An empty contiguous tensor of x's type, and of its shape if none is given."""
    return x.new_empty(shape or x.shape)


def new_stats(x: Tensor, *shape: int) -> Tensor:
    """An empty tensor in the summing type of x's."""
    return x.new_empty(shape, dtype=sum_dtype(x.dtype))
