"""Repairs of Triton's interpreter, for `kernels.backend=interpret`: bfloat16, comparisons, speed.

The interpreter stores bfloat16 as raw 16-bit integers and computes on those, and gives comparisons
the type of their operands, in every version from 3.6 to 3.9. `install` replaces the operations
that do so; on an interpreter that is right their results are the same. It also patches
triton.language once for the process instead of at every nested call, which takes most of the
interpreter's time; such a process can no longer compile kernels. No process that compiles kernels
imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter as interp

from megalite.kernels.errors import BackendError

BF16 = tl.bfloat16
FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
builder = interp.interpreter_builder
np = interp.np  # the numpy that the interpreter uses
Handle = interp.TensorHandle


def widen(bits: Any) -> Any:
    """float32 values of bfloat16 bit patterns."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(values: Any) -> Any:
    """bfloat16 bit patterns nearest to float32 values, ties to even; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == BF16)


def _wide(x: Any) -> Any:
    """A bfloat16 handle as float32; others as they are."""
    return Handle(widen(x.data), tl.float32) if isinstance(x, Handle) and _is_bf16(x) else x


def _through_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with bfloat16 operands widened, its result rounded, and comparisons of type int1.

    With the type of the operands, a scalar result of a comparison is broadcast wrongly.
    """

    def call(self: Any, *operands: Any, **options: Any) -> Any:
        if operands[-1] is np.where:
            return method(self, *operands, **options)
        result = method(self, *map(_wide, operands), **options)
        if result.data.dtype == np.bool_:
            return Handle(result.data, tl.int1)
        narrowed = any(isinstance(x, Handle) and _is_bf16(x) for x in operands)
        return Handle(narrow(result.data), BF16) if narrowed else result

    return call


def _dot(method: Callable[..., Any]) -> Callable[..., Any]:
    """The product with bfloat16 factors widened."""
    return lambda self, a, b, *rest: method(self, _wide(a), _wide(b), *rest)


def _cast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Casts that round to nearest even for bfloat16 and 8 bits, and read bfloat16 as float32."""

    def call(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        scalar, wide = target.scalar, _wide(source)
        if scalar == BF16:
            return source if _is_bf16(source) else Handle(narrow(source.data), BF16)
        if scalar in FP8 and wide.dtype.scalar == tl.float32:
            values = torch.from_numpy(np.ascontiguousarray(wide.data, dtype=np.float32))
            return Handle(values.to(FP8[scalar]).view(torch.uint8).numpy(), scalar)
        if scalar == tl.float32 and _is_bf16(source):
            return wide
        return method(self, wide, target, *rest)

    return call


_ARITHMETIC = ("binary_op", "unary_op", "ternary_op", "create_rsqrt", "create_erf", "create_fma")
REPAIRS = {
    **dict.fromkeys(_ARITHMETIC, _through_float32),
    **dict.fromkeys(("cast_impl", "create_fp_to_fp"), _cast),
    "create_dot": _dot,
}


def _check() -> None:
    """Raise BackendError if operations are still wrong, as in an interpreter of another make."""
    source = Handle(np.array([1 + 2**-8 + 2**-16, 1 + 2**-8], dtype=np.float32), tl.float32)
    rounded = builder.create_fp_to_fp(source, BF16, interp._ir.ROUNDING_MODE.RTNE)
    doubled = builder.create_fadd(rounded, rounded)
    less = builder.create_fcmpOLT(source, source)
    if widen(doubled.data).tolist() != [2 + 2**-6, 2.0] or less.dtype != tl.int1:
        raise BackendError(
            "kernels.backend=interpret: this triton's interpreter does not compute in bfloat16 as "
            "those of 3.6 to 3.9 do; use one of them, or reference"
        )


def _refuse_raw_sums() -> None:
    """Make a reduction over a bfloat16 tile raise TypeError: it would add bit patterns.

    Kernels convert to float32 right after the load.
    """
    original = interp.ReduceOps.apply_impl

    def apply_impl(self: Any, inputs: Any) -> Any:
        if any(_is_bf16(x) for x in inputs):
            raise TypeError("reduction over a bfloat16 tile: convert it to float32 after the load")
        return original(self, inputs)

    interp.ReduceOps.apply_impl = apply_impl


def _patch_language_once() -> None:
    """Patch triton.language for the rest of the process, so nested calls need not do it again."""
    interp._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    # a loop bound known at run time is a one-element array, for which numpy 2.4 refuses int()
    tl.core.tensor.__index__ = lambda self: int(self.handle.data.squeeze())
    interp._patch_lang = lambda fn: interp._LangPatchScope()


@cache
def install() -> None:
    """Repair the interpreter of this process, once. Raises BackendError as `_check`."""
    np.seterr(all="ignore")  # masks use infinities, which are no errors
    for name, repair in REPAIRS.items():
        setattr(interp.InterpreterBuilder, name, repair(getattr(interp.InterpreterBuilder, name)))
    _check()
    _refuse_raw_sums()
    _patch_language_once()
