"""Launches of kernels that Triton has compiled, without Triton's dispatch.

Triton looks at every argument of every launch to choose the compiled kernel, some 36 Python calls.
A `Prepared` kernel keeps what Triton chose, by the `form` of the arguments, and afterwards starts
it as `JITFunction.run` does. The first launch of a form goes through Triton, and so does every
launch that somebody watches or that this module does not know.

Settings of Triton that are read at each of its launches (TRITON_DEBUG and the like) count as they
were at the first launch of a form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

# The releases whose JITFunction.run starts kernels as `Prepared` does, first and last.
_KNOWN = ((3, 6), (3, 9))
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_TENSORS = (Tensor, Parameter)
_TYPES = {Tensor, Parameter, TensorDescriptor, int, float, type(None)}
_RUN = JITFunction.run
_Grid = tuple[int, ...]


class Prepared:
    """A kernel, launched as `kernel[grid](*arguments, **constants)`: constexprs by keyword."""

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        # By device, form and constants: what starts the kernel, its handle, what it is packed
        # with, and the constexprs in the order of the kernel's parameters.
        self._launches: dict[tuple[Any, ...], tuple[Callable[..., None], Any, Any, Any]] = {}

    def __getitem__(self, grid: _Grid) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: _Grid, *arguments: Any, **constants: Any) -> None:
        # Hooks, of profilers for example, are called by Triton.
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        watched = (
            JITFunction.run is not _RUN
            or type(enter) is not knobs.HookChain
            or type(leave) is not knobs.HookChain
            or enter.calls
            or leave.calls
            or self.jit.pre_run_hooks
            or runtime.add_stages_inspection_hook is not None
        )
        if watched:
            self.jit[grid](*arguments, **constants)
            return

        active = driver.active
        device = active.get_current_device()
        # Of each argument all that Triton chooses a kernel by. In place, since this is called for
        # every launch; an object of its own, which equals nothing, for a type that is not known.
        form = [
            (x.dtype, x.data_ptr() % 16 == 0)
            if type(x) in _TENSORS
            else (x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63)
            if type(x) is int
            else (x.base.dtype, *x.block_shape)
            if type(x) is TensorDescriptor
            else type(x)
            if type(x) in _TYPES
            else object()
            for x in arguments
        ]
        key = (device, *form, *constants.items())
        try:
            run, function, packed, tail = self._launches[key]
        except KeyError:
            kernel = self.jit[grid](*arguments, **constants)
            if self._can_keep(kernel, arguments, constants):
                names = self.jit.arg_names[len(arguments) :]
                tail = tuple(constants[name] for name in names)
                self._launches[key] = (kernel.run, kernel.function, kernel.packed_metadata, tail)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        run(x, y, z, stream, function, packed, None, None, None, *arguments, *tail)

    def _can_keep(self, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> bool:
        """True for a kernel that is compiled, and arguments whose form is all that it depends on:
        of known types, and exactly the constexprs by keyword.
        """
        rest = range(len(arguments), len(self.jit.arg_names))
        return (
            isinstance(kernel, CompiledKernel)
            and {type(x) for x in arguments} <= _TYPES
            and self.jit.constexprs == list(rest)
            and {self.jit.arg_names[i] for i in rest} <= set(constants)
        )


def prepared(jit: Any) -> Any:
    """A `Prepared` kernel; `jit` as it is in the interpreter, in other releases, or replaced."""
    known = _KNOWN[0] <= _VERSION <= _KNOWN[1] and _RUN.__module__ == JITFunction.__module__
    return Prepared(jit) if known and isinstance(jit, JITFunction) else jit
