"""Repairs of Triton's interpreter, for `kernels.backend=interpret`: bfloat16, comparisons, speed.

The interpreter stores bfloat16 as raw 16-bit integers and computes on those, and gives comparisons
the type of their operands. `install` probes each operation and replaces the wrong ones, so an
interpreter without these faults is used as it is. It also patches triton.language once for the
process instead of at every nested call, which takes most of the interpreter's time; such a process
can no longer compile kernels. No process that compiles kernels imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter as interp

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


def _wide(handle: Any) -> Any:
    """A bfloat16 handle as float32; others as they are."""
    return Handle(widen(handle.data), tl.float32) if _is_bf16(handle) else handle


def _rounded(result: Any) -> Any:
    """A float32 result as bfloat16; the result of a comparison as int1."""
    if result.data.dtype == np.bool_:
        return Handle(result.data, tl.int1)
    return Handle(narrow(result.data), BF16)


def _through_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """The builder's method with bfloat16 operands widened and its result rounded."""

    def call(self: Any, *operands: Any, **options: Any) -> Any:
        handles = [x for x in operands if isinstance(x, Handle)]
        if not any(_is_bf16(x) for x in handles) or operands[-1] is np.where:
            return method(self, *operands, **options)
        operands = tuple(_wide(x) if isinstance(x, Handle) else x for x in operands)
        return _rounded(method(self, *operands, **options))

    return call


def _comparisons_are_bool(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with results of comparisons of type int1.

    With the type of the operands, a scalar result is broadcast wrongly.
    """

    def call(self: Any, *operands: Any) -> Any:
        result = method(self, *operands)
        if result.data.dtype == np.bool_:
            return Handle(result.data, tl.int1)
        return result

    return call


def _dot(method: Callable[..., Any]) -> Callable[..., Any]:
    """The product with bfloat16 factors widened."""

    def call(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return method(self, _wide(a), _wide(b), *rest)

    return call


def _cast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Casts that round to nearest even for bfloat16, and read bfloat16 through float32."""

    def call(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        scalar = target.scalar
        if _is_bf16(source) and scalar == BF16:
            return source
        if _is_bf16(source):
            wide = _wide(source)
            return wide if scalar == tl.float32 else method(self, wide, target, *rest)
        if scalar == BF16:
            return Handle(narrow(source.data), BF16)
        return method(self, source, target, *rest)

    return call


def _as_fp8(values: Any, dtype: Any) -> Any:
    """The bit patterns of float32 values in an 8-bit type."""
    wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return wide.to(FP8[dtype]).view(torch.uint8).numpy()


def _cast_to_fp8(method: Callable[..., Any]) -> Callable[..., Any]:
    """Casts from float32 to 8 bits by torch."""

    def call(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar in FP8:
            return Handle(_as_fp8(source.data, target.scalar), target.scalar)
        return method(self, source, target, *rest)

    return call


def _probe_fp8() -> bool:
    values = np.linspace(-460, 460, 997, dtype=np.float32)
    rounding = interp._ir.ROUNDING_MODE.RTNE
    source = Handle(values, tl.float32)
    return all(
        np.array_equal(
            builder.create_fp_to_fp(source, dtype, rounding).data, _as_fp8(values, dtype)
        )
        for dtype in FP8
    )


def _probe_handle(*values: float) -> Any:
    return Handle(narrow(np.array(values, dtype=np.float32)), BF16)


def _values(handle: Any) -> list[float]:
    data = widen(handle.data) if handle.data.dtype == np.uint16 else handle.data
    return [float(x) for x in np.ravel(data)]


def _probe_cast(method: str) -> bool:
    # 1 + 2^-8 + 2^-16 rounds up, 1 + 2^-8 is a tie that stays even, 1 + 3 * 2^-8 a tie going up
    source = np.array([1 + 2**-8 + 2**-16, 1 + 2**-8, 1 + 3 * 2**-8], dtype=np.float32)
    rest = (interp._ir.ROUNDING_MODE.RTNE,) if method == "create_fp_to_fp" else ()
    got = getattr(builder, method)(Handle(source, tl.float32), BF16, *rest)
    return _values(got) == [1 + 2**-7, 1.0, 1 + 2**-6]


def _probe_binary() -> bool:
    got = builder.create_fadd(_probe_handle(1.5, -2.0), _probe_handle(0.25, 1.0))
    less = builder.create_fcmpOLT(_probe_handle(-1.0, 2.0), _probe_handle(0.0, 0.0))
    return _values(got) == [1.75, -1.0] and [bool(x) for x in less.data] == [True, False]


def _probe_comparison() -> bool:
    one = Handle(np.ones(1, dtype=np.float32), tl.float32)
    return bool(builder.create_fcmpOLT(one, one).dtype == tl.int1)


def _probe_unary() -> bool:
    return _values(builder.create_sqrt(_probe_handle(4.0, 2.25))) == [2.0, 1.5]


def _probe_ternary() -> bool:
    x = _probe_handle(-3.0, 0.5)
    low, high = _probe_handle(-1.0, -1.0), _probe_handle(1.0, 1.0)
    return _values(builder.create_clampf(x, low, high, interp._ir.PROPAGATE_NAN.ALL)) == [-1.0, 0.5]


def _probe_dot() -> bool:
    a = Handle(narrow(np.array([[1.5, 2.0]], dtype=np.float32)), BF16)
    b = Handle(narrow(np.array([[2.0], [-1.0]], dtype=np.float32)), BF16)
    zero = Handle(np.zeros((1, 1), dtype=np.float32), tl.float32)
    return _values(builder.create_dot(a, b, zero, None, 0)) == [1.0]


def _right(probe: Callable[[], bool]) -> bool:
    """True if the probe succeeds; an operation that raises is wrong, too."""
    try:
        return probe()
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return False


# (method, probe that is True if it is right, function that wraps it)
Repair = tuple[str, Callable[[], bool], Callable[..., Any]]
REPAIRS: list[Repair] = [
    ("cast_impl", lambda: _probe_cast("cast_impl"), _cast),
    ("create_fp_to_fp", lambda: _probe_cast("create_fp_to_fp"), _cast),
    ("create_fp_to_fp", _probe_fp8, _cast_to_fp8),
    ("binary_op", _probe_binary, _through_float32),
    ("binary_op", _probe_comparison, _comparisons_are_bool),
    ("unary_op", _probe_unary, _through_float32),
    ("ternary_op", _probe_ternary, _through_float32),
    (
        "create_rsqrt",
        lambda: _values(builder.create_rsqrt(_probe_handle(4.0))) == [0.5],
        _through_float32,
    ),
    (
        "create_erf",
        lambda: _values(builder.create_erf(_probe_handle(0.0, 8.0))) == [0.0, 1.0],
        _through_float32,
    ),
    (
        "create_fma",
        lambda: (
            _values(builder.create_fma(_probe_handle(2.0), _probe_handle(3.0), _probe_handle(1.0)))
            == [7.0]
        ),
        _through_float32,
    ),
    ("create_dot", _probe_dot, _dot),
]


def repair_builder() -> list[str]:
    """Replace the operations whose probe fails; returns their names."""
    cls = interp.InterpreterBuilder
    repaired = []
    for name, probe, repair in REPAIRS:
        if not _right(probe):
            setattr(cls, name, repair(getattr(cls, name)))
            assert probe(), f"{name} is still wrong after its repair"
            repaired.append(name)
    return repaired


def _refuse_raw_sums() -> None:
    """Make a reduction over a bfloat16 tile raise TypeError: it would add bit patterns.

    Kernels convert to float32 right after the load.
    """
    original = interp.ReduceOps.apply_impl

    def apply_impl(self: Any, inputs: Any) -> Any:
        if any(x.dtype.scalar == BF16 for x in inputs):
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
def install() -> tuple[str, ...]:
    """Repair the interpreter of this process, once; returns the names of the repaired methods."""
    np.seterr(all="ignore")  # masks use infinities, which are no errors
    repaired = repair_builder()
    _refuse_raw_sums()
    _patch_language_once()
    return tuple(repaired)
