"""Checks of the arguments of `functional`, made before anything reaches a kernel.

They read what the host has: types, shapes, devices and numbers, never values on a GPU, which would
wait for it. Values of CPU tensors are checked too where a wrong one would go unnoticed, in the
operators' bodies (`check_indices`, `check_adamw`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megalite.kernels.plain import dropout
from megalite.kernels.plain.dropout import Key
from megalite.kernels.plain.intervals import Intervals
from megalite.kernels.plain.moe import RowMap

STORAGE = (torch.float32, torch.bfloat16, torch.float16)
FLOATS = (*STORAGE, torch.float64)
WIDE = (torch.float32, torch.float64)
INDEX = (torch.int64, torch.int32)

Shape = tuple[int | str | None, ...]  # any size for None, and for a string, which names the dim


def check_tensor(
    operation: str,
    name: str,
    x: object,
    types: Sequence[torch.dtype],
    shape: Shape | None = None,
    like: Tensor | None = None,
) -> None:
    """Raise TypeError, ValueError unless x has one of these types, this shape, `like`'s device."""
    # The type first: everything below is an attribute of a tensor.
    if not isinstance(x, Tensor):
        raise TypeError(f"{operation}: {name} is a {type(x).__name__}, expected a tensor")
    if x.dtype not in types:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in types)
        raise TypeError(f"{operation}: {name} is {x.dtype}, expected {allowed}; cast it")
    if x.layout != torch.strided:
        raise TypeError(f"{operation}: {name} is {x.layout}, expected dense; pass .to_dense()")

    if shape is not None and x.shape != shape and not _fits(x.shape, shape):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{operation}: {name} has shape {tuple(x.shape)}, expected ({sizes})")
    if like is not None and x.device != like.device:
        raise ValueError(
            f"{operation}: {name} is on {x.device}, the first tensor on {like.device}; move one"
        )

    # Without a rule of its own torch takes a tangent of zeros, and the result would be wrong.
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise ValueError(
            f"{operation}: {name} carries a forward-mode tangent (jvp), which has no rule here; "
            "use backward, or torch.autograd.grad"
        )


def _fits(sizes: tuple[int, ...], shape: Shape) -> bool:
    """True if the sizes are as many as those of `shape`, and equal where it gives a number."""
    if len(sizes) != len(shape):
        return False
    for got, want in zip(sizes, shape, strict=True):
        if want is not None and not isinstance(want, str) and got != want:
            return False
    return True


def check_rows_of(operation: str, name: str, x: Tensor) -> None:
    """Raise TypeError, ValueError unless x is floating point and has a last dim."""
    check_tensor(operation, name, x, FLOATS)
    if not x.dim():
        raise ValueError(f"{operation}: {name} is a single number, expected at least one dimension")


def parameter_types(x: Tensor) -> Sequence[torch.dtype]:
    """Types that another tensor than x may have, such as a weight: float64 only if x has it."""
    return FLOATS if x.dtype == torch.float64 else STORAGE


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


def check_no_gradient(operation: str, **tensors: Tensor | None) -> None:
    """Raise ValueError if a tensor requires a gradient that the operation does not compute."""
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{operation}: {name} requires a gradient, and this operation computes none for "
                f"it; pass {name}.detach()"
            )


# --- operations ----------------------------------------------------------------------------------


def check_norm(operation: str, x: Tensor, eps: float, **params: Tensor) -> None:
    """Raise TypeError, ValueError for arguments that a norm over the last dim does not take."""
    check_rows_of(operation, "x", x)
    if x.shape[-1] == 0:
        raise ValueError(f"{operation}: x has shape {tuple(x.shape)}, expected columns to norm")
    for name, param in params.items():
        check_tensor(operation, name, param, parameter_types(x), (x.shape[-1],), x)
    check_range(operation, "eps", eps, 0.0, math.inf)


def check_residual(operation: str, x: Tensor, residual: Tensor) -> None:
    """Raise TypeError, ValueError unless the residual has x's shape, type and device."""
    check_tensor(operation, "residual", residual, (x.dtype,), tuple(x.shape), x)


def check_swiglu(h: Tensor) -> None:
    """Raise TypeError, ValueError unless h is floating point with an even number of columns."""
    check_rows_of("swiglu", "h", h)
    if h.shape[-1] % 2:
        raise ValueError(f"swiglu: h has {h.shape[-1]} columns, expected an even number: gate | up")


def check_gelu(h: Tensor, bias_f: Tensor | None) -> None:
    """Raise TypeError, ValueError unless h is floating point and the bias has its columns."""
    check_rows_of("gelu", "h", h)
    if bias_f is not None:
        check_tensor("gelu", "bias", bias_f, parameter_types(h), (h.shape[-1],), h)


def check_rope(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor | None) -> None:
    """Raise TypeError, ValueError for heads, tables or positions that do not fit each other."""
    check_tensor("rope", "x", x, FLOATS, ("tokens", "heads", "head dim"))
    check_tensor("rope", "cos", cos, WIDE, ("positions", "pairs"), x)
    check_tensor("rope", "sin", sin, (cos.dtype,), tuple(cos.shape), x)
    check_no_gradient("rope", cos=cos, sin=sin)
    length, half = cos.shape
    if 2 * half > x.shape[2]:
        raise ValueError(f"rope: tables turn {2 * half} elements, a head has {x.shape[2]}")
    if length == 0 and len(x):
        raise ValueError("rope: tables have no positions; make them as long as the sequence")
    if position is not None:
        check_tensor("rope", "position", position, INDEX, (len(x),), x)
    elif len(x) > length and len(x) % length:
        raise ValueError(
            f"rope: {len(x)} tokens are no whole number of sequences of {length}, the tables' "
            "positions; pass position, or longer tables"
        )


def check_dropout(x: Tensor, key: Key, p: float) -> None:
    """Raise TypeError, ValueError unless x is a matrix and p and key make a mask."""
    check_tensor("dropout", "x", x, FLOATS, ("tokens", "columns"))
    dropout.check_dropout(p, key)


def check_attention(q: Tensor, k: Tensor, v: Tensor, mask: Intervals, scale: float | None) -> None:
    """Raise TypeError, ValueError for heads, a mask or a scale that attention does not take."""
    check_tensor("attention", "q", q, FLOATS, ("tokens", "heads", "head dim"))
    queries, heads, head_dim = q.shape
    check_tensor("attention", "k", k, (q.dtype,), ("keys", "heads", head_dim), q)
    check_tensor("attention", "v", v, (q.dtype,), tuple(k.shape), q)
    keys, kv_heads, _ = k.shape
    if kv_heads == 0 or heads % kv_heads or head_dim == 0:
        raise ValueError(
            f"attention: {heads} query heads of {head_dim} over {kv_heads} key/value heads, "
            "expected a multiple of at least one key/value head, and at least one element"
        )
    if not isinstance(mask, Intervals):
        raise TypeError(
            f"attention: mask is a {type(mask).__name__}, expected Intervals; "
            "document_intervals makes them"
        )
    for name, length in (("lo", queries), ("up", queries), ("key_lo", keys), ("key_up", keys)):
        bound = getattr(mask, name)
        check_tensor("attention", f"mask.{name}", bound, (torch.int32,), (length,), q)
    if scale is not None:
        check_scale(scale)


def check_sides(mask: Intervals) -> None:
    """Raise ValueError if a mask on a CPU differs by queries and by keys."""
    if mask.lo.device.type != "cpu":
        return
    query, key = torch.arange(len(mask.lo))[:, None], torch.arange(len(mask.key_lo))
    by_query = (key >= mask.lo[:, None]) & (key < mask.up[:, None])
    by_key = (query >= mask.key_lo) & (query < mask.key_up)
    if not torch.equal(by_query, by_key):
        i, j = (by_query != by_key).nonzero()[0].tolist()
        raise ValueError(
            f"attention: mask.lo and mask.up let query {i} see key {j}: {bool(by_query[i, j])}, "
            f"mask.key_lo and mask.key_up: {bool(by_key[i, j])}; gradients would be of another "
            "mask; document_intervals makes both sides"
        )


def check_scale(scale: float) -> None:
    """Raise ValueError unless the scale of scores is a finite number above 0."""
    if not 0.0 < scale < math.inf:
        raise ValueError(f"attention: scale={scale}, expected a positive number")


def check_loss(
    operation: str,
    rows: Tensor,
    columns: int,
    label: Tensor,
    weight: Tensor | None,
    *,
    z_loss: float,
    smoothing: float,
    vocab_size: int,
) -> None:
    """Raise TypeError, ValueError for labels, weights or numbers that a loss does not take.

    rows: the logits, or the tensor they are made of; columns: the number of columns of the logits.
    """
    tokens = len(rows)
    if not 1 <= vocab_size <= columns:
        raise ValueError(f"{operation}: vocab_size={vocab_size}, expected 1 to {columns} (columns)")
    check_tensor(operation, "label", label, (torch.int64,), (tokens,), rows)
    if weight is not None:
        check_tensor(operation, "weight", weight, FLOATS, (tokens,), rows)
        check_no_gradient(operation, weight=weight)
    check_range(operation, "z_loss", z_loss, 0.0, math.inf)
    check_range(operation, "smoothing", smoothing, 0.0, 1.0, last=True)


def check_indices(
    operation: str, name: str, index: Tensor, size: int, ignored: int | None = None
) -> None:
    """Raise ValueError if an index on a CPU is outside 0 ... size - 1 and not `ignored`.

    Other devices are not read, as that would wait. For bodies of operators, which never see traced
    or batched tensors.
    """
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


def check_map(operation: str, rows: RowMap, like: Tensor) -> tuple[int, int]:
    """(T, K) of a map. Raises TypeError, ValueError unless it is one, on `like`'s device."""
    if not isinstance(rows, RowMap):
        raise TypeError(
            f"{operation}: rows is a {type(rows).__name__}, expected what expert_rows gives"
        )
    check_tensor(operation, "row", rows.row_TK, (torch.int32,), ("tokens", "copies"), like)
    check_tensor(operation, "offset", rows.offset_E1, (torch.int32,), ("experts + 1",), like)
    tokens, copies = rows.row_TK.shape
    return tokens, copies


def check_row_values(operation: str, row_TK: Tensor) -> None:
    """Raise ValueError if a map on a CPU does not hold each row once."""
    if row_TK.device.type != "cpu" or not row_TK.numel():
        return
    position = row_TK.where(row_TK >= 0, -1 - row_TK).flatten().long()
    held = torch.zeros(len(position), dtype=torch.bool)
    if int(position.max()) < len(held):
        held[position] = True
    if not held.all():
        raise ValueError(
            f"{operation}: row does not hold each of {len(held)} rows once; pass what expert_rows "
            "gives"
        )


def check_offsets(operation: str, offset_E1: Tensor, num_rows: int) -> None:
    """Raise ValueError if offsets on a CPU do not rise from 0 to at most the number of rows."""
    if offset_E1.device.type != "cpu":
        return
    offsets = offset_E1.tolist()
    if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > num_rows:
        raise ValueError(
            f"{operation}: offset is {offsets[:8]}, expected to rise from 0 to at most {num_rows}; "
            "pass what expert_rows gives"
        )


def check_adamw(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    low: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Raise TypeError, ValueError for tensors or numbers that AdamW does not take."""
    # The weight first: it gives the length and the types that the others must have.
    check_tensor("adamw_", "weight", weight, WIDE, ("elements",))
    size, types = (len(weight),), parameter_types(weight)
    check_tensor("adamw_", "grad", grad, types, size, weight)
    check_tensor("adamw_", "exp_avg", exp_avg, types, size, weight)
    check_tensor("adamw_", "exp_avg_sq", exp_avg_sq, (exp_avg.dtype,), size, weight)
    check_tensor("adamw_", "hyper", hyper, (torch.float32, weight.dtype), (4,), weight)
    if low is not None:
        check_tensor("adamw_", "low", low, types, size, weight)
    for x in (weight, grad, exp_avg, exp_avg_sq, low):
        if x is not None and not x.is_contiguous():
            raise ValueError(f"adamw_: a tensor has stride {x.stride(0)}, expected flat buffers")

    check_range("adamw_", "beta1", beta1, 0.0, 1.0)
    check_range("adamw_", "beta2", beta2, 0.0, 1.0)
    check_range("adamw_", "eps", eps, 0.0, math.inf)
    check_range("adamw_", "weight_decay", weight_decay, 0.0, math.inf)
    # Bias corrections of update 0 divide by zero. On a GPU, reading them would wait.
    if hyper.device.type == "cpu" and not bool((hyper[1:3] > 0).all()):
        raise ValueError(
            f"adamw_: hyper holds bias corrections of {hyper[1:3].tolist()}, expected above 0: the "
            "first update is number 1"
        )


CAST_TYPES = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)


def check_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError, ValueError for types or a scale that a cast does not take."""
    check_tensor("scale_cast", "x", x, FLOATS)
    scale_types = WIDE if x.dtype == torch.float64 else (torch.float32,)
    check_tensor("scale_cast", "scale", scale, scale_types, like=x)
    if scale.numel() != 1:
        raise ValueError(f"scale_cast: scale has shape {tuple(scale.shape)}, expected one number")
    if dtype not in CAST_TYPES or (dtype == torch.float64 and x.dtype != torch.float64):
        allowed = ", ".join(str(each).removeprefix("torch.") for each in CAST_TYPES)
        raise TypeError(
            f"scale_cast: from {x.dtype} to {dtype}, expected {allowed}, float64 only from float64"
        )
