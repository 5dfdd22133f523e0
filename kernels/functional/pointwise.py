"""Activations, rotation, dropout and casts.

An operator must not write into its arguments, so a gradient that is written over h is given a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.kernels.arguments import rows_readable, vector
from megalite.kernels.functional.checks import (
    FLOATS,
    INDEX,
    PARAMETER,
    WIDE,
    Arg,
    check,
    check_indices,
    names,
)
from megalite.kernels.functional.operator import Operator, new, new_stats, operator, rows
from megalite.kernels.operations import Kernels
from megalite.kernels.plain.dropout import check_dropout

CAST_TYPES = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)

_swiglu_grad = operator(
    "swiglu_grad(Tensor da, Tensor h) -> Tensor dh",
    lambda ops, da, h: ops.swiglu_grad(da, h.clone())[0],
    lambda da, h: torch.empty_like(h),
)
_swiglu = operator(
    "swiglu(Tensor h) -> Tensor a",
    "swiglu",
    lambda h: new(h, len(h), h.shape[1] // 2),
    _swiglu_grad,
)


def swiglu(h: Tensor) -> Tensor:
    """silu(gate) * up of rows that hold gate | up: [..., 2f] -> [..., f]."""
    columns = check("swiglu", h=Arg(h, FLOATS, "..., columns"))["columns"]
    if columns % 2:
        raise ValueError(f"swiglu: h has {columns} columns, expected an even number: gate | up")
    a: Tensor = _swiglu(rows(h))
    return a.view(*h.shape[:-1], columns // 2)


def _compute_gelu_grad(
    ops: Kernels, da: Tensor, h: Tensor, bias: Tensor | None, erf: bool
) -> tuple[Tensor, Tensor | None]:
    dh, _, dbias = ops.gelu_grad(da, h.clone(), False, bias, erf=erf)
    return dh, dbias


_gelu_grad = operator(
    "gelu_grad(Tensor da, Tensor h, Tensor? bias, bool erf) -> (Tensor dh, Tensor dbias)",
    _compute_gelu_grad,
    lambda da, h, bias, erf: (
        torch.empty_like(h),
        None if bias is None else new_stats(h, h.shape[1]),
    ),
)
_gelu = operator(
    "gelu(Tensor h, Tensor? bias, bool erf) -> Tensor a",
    lambda ops, h, bias, erf: ops.gelu(h, bias, erf=erf),
    lambda h, bias, erf: new(h),
    _gelu_grad,
)


def gelu(h: Tensor, bias_f: Tensor | None = None, *, erf: bool = False) -> Tensor:
    """gelu(h + bias) in the tanh form, or the exact one."""
    bias = Arg(bias_f, PARAMETER, "columns", optional=True)
    check("gelu", h=Arg(h, FLOATS, "..., columns"), bias=bias)
    a: Tensor = _gelu(rows(h), vector(bias_f), erf)
    return a.view(h.shape)


def _compute_rope(
    ops: Kernels, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor | None, inverse: bool
) -> Tensor:
    if position is not None:
        check_indices("rope", "position", position, len(cos))
    return ops.rotate_heads(x, cos, sin, position, inverse=inverse)


_rope: Operator = operator(
    "rope(Tensor x, Tensor cos, Tensor sin, Tensor? position, bool inverse) -> Tensor y",
    _compute_rope,
    lambda x, *_: new(x),
    lambda dy, cos, sin, position, inverse: {"dx": _rope(dy, cos, sin, position, not inverse)},
)


def rope(x_TNH: Tensor, cos_sh: Tensor, sin_sh: Tensor, position_T: Tensor | None = None) -> Tensor:
    """Every head of x[T, N, H] rotated by its token's position: position_T[t], or t mod s.

    cos_sh, sin_sh: tables [s, R/2] of `megalite.kernels.rope_tables`, float32; elements from R on
    are copied. position_T: int32 or int64, below s. Without it T <= s, or T is a multiple of s.
    """
    sizes = check(
        "rope",
        x=Arg(x_TNH, FLOATS, "tokens, heads, head dim"),
        cos=Arg(cos_sh, WIDE, "positions, pairs", constant=True),
        sin=Arg(sin_sh, "cos", "cos", constant=True),
        position=Arg(position_T, INDEX, "tokens", optional=True),
    )
    tokens, length = sizes["tokens"], sizes["positions"]
    if 2 * sizes["pairs"] > sizes["head dim"]:
        raise ValueError(
            f"rope: tables turn {2 * sizes['pairs']} elements, a head has {sizes['head dim']}"
        )
    if length == 0 and tokens:
        raise ValueError("rope: tables have no positions; make them as long as the sequence")
    if position_T is None and tokens > length and tokens % length:
        raise ValueError(
            f"rope: {tokens} tokens are no whole number of sequences of {length}, the tables' "
            "positions; pass position, or longer tables"
        )
    y: Tensor = _rope(x_TNH, cos_sh, sin_sh, position_T, False)
    return y


_dropout: Operator = operator(
    "dropout(Tensor x, int key0, int key1, float p, int first_token) -> Tensor y",
    lambda ops, x, key0, key1, p, first_token: ops.dropout(x, (key0, key1), p, first_token)[0],
    lambda x, *_: new(x),
    lambda dy, key0, key1, p, first_token: {"dx": _dropout(dy, key0, key1, p, first_token)},
)


def dropout(x_TD: Tensor, key: tuple[int, int], p: float, first_token: int = 0) -> Tensor:
    """x / (1 - p) where kept, else 0; the mask is a function of key, first_token + t, column."""
    check("dropout", x=Arg(x_TD, FLOATS, "tokens, columns"))
    check_dropout(p, key)
    y: Tensor = _dropout(rows_readable(x_TD), *key, p, first_token)
    return y


_scale_cast = operator(
    "scale_cast(Tensor x, Tensor scale, ScalarType dtype) -> Tensor y",
    "scale_cast",
    lambda x, scale, dtype: x.new_empty(x.shape, dtype=dtype),
)


def scale_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in another floating type (float8 too), saturated at its largest number.

    scale: one float32 on the device. NaN stays NaN; no gradient.
    """
    wide = isinstance(x, Tensor) and x.dtype == torch.float64
    check("scale_cast", x=Arg(x, FLOATS), scale=Arg(scale, WIDE if wide else WIDE[:1]))
    if scale.numel() != 1:
        raise ValueError(f"scale_cast: scale has shape {tuple(scale.shape)}, expected one number")
    if dtype not in CAST_TYPES or (dtype == torch.float64 and not wide):
        raise TypeError(
            f"scale_cast: from {x.dtype} to {dtype}, expected {names(CAST_TYPES)}, float64 only "
            "from float64"
        )
    y: Tensor = _scale_cast(x, scale, dtype)
    return y
