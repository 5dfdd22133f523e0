"""Tiles of memory, masks and dropout words for attention's forward and backward in Triton.

An interval mask lets query i see keys lo[i] <= j < up[i]. A block of queries loops over its partly
visible key blocks first, with the mask, and then over the fully visible ones without; a block of
keys loops over its queries likewise. Inputs are loaded through TMA descriptors of the 2-D view
[T, heads * H] if H is a power of two and memory is aligned, else through masked pointers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megalite.kernels.arguments import (
    check_float,
    check_same,
    check_shape,
    next_power_of_2,
    once_per_form,
)
from megalite.kernels.plain.intervals import Intervals
from megalite.kernels.triton.dropout import keep_threshold, mix, row_word, signed_word
from megalite.kernels.triton.tables import OPTIONS, choose

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
LOG2_E = 1.4426950408889634
UNSPECIALIZED = ["first_query", "first_key", "first_head", "key0", "key1", "threshold"]
_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


@triton.jit
def load_tile(
    source, row, rows, head, stride, ROWS: tl.constexpr, H: tl.constexpr, TMA: tl.constexpr
):
    """Rows row ... row + ROWS - 1 of one head, [ROWS, next power of two of H], 0 outside."""
    if TMA:
        tile = source.load([row, head * H])
    else:
        BLOCK: tl.constexpr = triton.next_power_of_2(H)
        at = row + tl.arange(0, ROWS).to(tl.int64)
        dim = tl.arange(0, BLOCK)
        inside = (at < rows)[:, None] & (dim < H)[None, :]
        tile = tl.load(
            source + (at * stride)[:, None] + (head * H + dim)[None, :], mask=inside, other=0.0
        )
    return tile


@triton.jit
def store_tile(out_ptr, value, row, rows, head, stride, ROWS: tl.constexpr, H: tl.constexpr):
    """Store [ROWS, next power of two of H] to rows row ... row + ROWS - 1 of one head."""
    BLOCK: tl.constexpr = triton.next_power_of_2(H)
    at = row + tl.arange(0, ROWS).to(tl.int64)
    dim = tl.arange(0, BLOCK)
    inside = (at < rows)[:, None] & (dim < H)[None, :]
    where = out_ptr + (at * stride)[:, None] + (head * H + dim)[None, :]
    tl.store(where, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def bounds(lo_ptr, up_ptr, row, rows, length, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS intervals (lo, up), and the bounds of their blocks of columns.

    Those are, in steps of BLOCK: start ... full_start partly visible, full_start ... full_stop
    visible to all rows, full_stop ... stop partly visible. Rows past the end see nothing: their
    interval is empty and limits no bound.
    """
    at = row + tl.arange(0, ROWS)
    inside = at < rows
    lo = tl.load(lo_ptr + at, mask=inside, other=0)
    up = tl.load(up_ptr + at, mask=inside, other=0)
    start = tl.min(tl.where(inside, lo, length), 0) // BLOCK * BLOCK
    stop = tl.max(tl.where(inside, up, 0), 0)
    stop = (stop + BLOCK - 1) // BLOCK * BLOCK
    full_start = (tl.max(tl.where(inside, lo, 0), 0) + BLOCK - 1) // BLOCK * BLOCK
    full_stop = tl.min(tl.where(inside, up, length), 0) // BLOCK * BLOCK
    stop = tl.maximum(start, stop)
    full_start = tl.minimum(full_start, stop)
    full_stop = tl.minimum(tl.maximum(full_start, full_stop), stop)
    full_start = tl.maximum(full_start, start)
    full_stop = tl.maximum(full_stop, full_start)
    return lo, up, start, full_start, full_stop, stop


@triton.jit
def query_words(first, row, plane, key0, key1, ROWS: tl.constexpr):
    """The two words a and b of the dropout mask for queries row ... row + ROWS - 1."""
    token = row + tl.arange(0, ROWS).to(tl.int64) + first
    plane = plane.to(tl.uint32)
    a = row_word(token, plane, key0.to(tl.uint32, bitcast=True))
    return a, row_word(token, plane, key1.to(tl.uint32, bitcast=True))


@triton.jit
def key_words(first, column, key0, COLUMNS: tl.constexpr):
    """The word c of the dropout mask for keys column ... column + COLUMNS - 1."""
    token = column + tl.arange(0, COLUMNS).to(tl.int64) + first
    return mix(token.to(tl.uint32) ^ key0.to(tl.uint32, bitcast=True))


class Drop(NamedTuple):
    """Dropout of attention weights, with the mask of plain/dropout.py.

    The weight of query i, key j and head n has token first_query + i, column first_key + j and
    plane first_head + n.
    """

    p: float
    key: tuple[int, int]
    first_query: int
    first_key: int
    first_head: int = 0

    def arguments(self) -> tuple[int | float, ...]:
        """The arguments of the kernels: first query, key and head, key words, threshold, scale."""
        words = (signed_word(word) for word in self.key)
        places = (self.first_query, self.first_key, self.first_head)
        return (*places, *words, keep_threshold(self.p), 1.0 / (1.0 - self.p))


NO_DROP = (0, 0, 0, 0, 0, 0, 1.0)


@dataclass(frozen=True)
class AttentionTiles:
    """Queries and keys that a program holds at once, warps, pipeline stages.

    two_loops: the kernel for dk and dv loops over fully visible blocks apart from the others.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    two_loops: bool = True

    def options(self) -> dict[str, Any]:
        """The arguments of a launch."""
        sizes = {"BM": self.queries, "BN": self.keys}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages, **OPTIONS}


def default_tiles(
    kernel: str, head_dim: int, dtype: torch.dtype, *, tma: bool = True, drop: bool = False
) -> AttentionTiles:
    """The tiles of a kernel ("forward", "dq", "dkdv") from the committed table (`tables`).

    tma: True for loads through descriptors. drop: True with dropout of the weights.
    """
    use = choose(
        f"attention_{kernel}",
        float32=dtype == torch.float32,
        head_dim=head_dim,
        descriptors=tma,
        dropout=drop,
    )
    since = tuple(int(part) for part in use.get("two_loops_since", "0").split("."))
    return AttentionTiles(
        use["queries"], use["keys"], use["warps"], use["stages"], two_loops=since <= _TRITON
    )


def _aligned(x: Tensor) -> bool:
    """True if a TMA descriptor can describe x: its rows are aligned and do not overlap."""
    stride = x.stride(0)
    aligned = x.data_ptr() % 16 == 0 and stride * x.dtype.itemsize % 16 == 0
    return aligned and stride >= x.shape[1]


def flat(x_THD: Tensor) -> Tensor:
    """The 2-D view [T, heads * H] of [T, heads, H]; a copy if heads are not adjacent."""
    tokens, heads, head_dim = x_THD.shape
    row, head, element = x_THD.stride()
    if element != 1 or (heads > 1 and head != head_dim):
        return x_THD.contiguous().view(tokens, heads * head_dim)
    return x_THD.as_strided((tokens, heads * head_dim), (row, 1))


def operand(x: Tensor, rows: int, head_dim: int, tma: bool) -> Tensor | TensorDescriptor:
    """x as `load_tile` takes it: a descriptor of tiles of `rows` rows, or x for pointers.

    Raises AssertionError or ValueError for what a descriptor cannot describe.
    """
    if not tma:
        return x
    form = (x.shape, x.stride(), x.dtype, rows, head_dim)
    if form not in _described or x.data_ptr() % 16:
        checked = TensorDescriptor.from_tensor(x, [rows, head_dim])
        fields = {name: value for name, value in vars(checked).items() if name != "base"}
        _described[form] = fields
        return checked

    # As the checked one of its form, since the checks take longer than a launch.
    descriptor: TensorDescriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__ = {**_described[form], "base": x}
    return descriptor


_described: dict[tuple[object, ...], dict[str, Any]] = {}  # fields of descriptors, by form


def tma_fits(head_dim: int, *tensors: Tensor) -> bool:
    """True if descriptors can load all tensors; they have no mask for columns beyond H."""
    return head_dim == next_power_of_2(head_dim) and all(map(_aligned, tensors))


def check_inputs(q: Tensor, k: Tensor, v: Tensor, mask: Intervals) -> None:
    """Raise TypeError, ValueError for inputs that the kernels do not take."""
    _check_inputs(q, k, v, mask.lo, mask.up, mask.key_lo, mask.key_up)


@once_per_form
def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, up: Tensor, key_lo: Tensor, key_up: Tensor
) -> None:
    check_float("attention", q=q, k=k, v=v)
    check_same("attention", "types", q=q.dtype, k=k.dtype, v=v.dtype)
    queries, heads, head_dim = q.shape
    keys, kv_heads, _ = k.shape
    check_shape("attention", (keys, kv_heads, head_dim), k=k, v=v)
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"attention: head_dim {head_dim} is not supported by the triton kernels {HEAD_DIMS}; "
            "pad q, k and v or use kernels.backend=reference"
        )
    if heads % kv_heads:
        raise ValueError(f"attention: {heads} query heads do not divide over {kv_heads} kv heads")
    check_shape("attention", (queries,), lo=lo, up=up)
    check_shape("attention", (keys,), key_lo=key_lo, key_up=key_up)


def positive_scale(scale: float | None, head_dim: int) -> float:
    """The scale of scores, 1 / sqrt(H) by default. Raises ValueError."""
    if scale is None:
        return float(head_dim**-0.5)
    if not scale > 0:
        raise ValueError(f"attention: scale={scale}, expected a positive number")
    return scale
