"""What attention's forward and backward in Triton share: tiles in and out, masks, dropout words.

An interval mask lets query i see keys lo[i] <= j < up[i]. A block of queries walks its partly
visible key blocks first, with the mask, and then the fully visible ones without; a block of keys
walks its queries likewise. Inputs come through TMA descriptors of the 2-D view [T, heads * H] where
H is a power of two and memory is aligned, else through masked pointers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megalite.kernels.arguments import check_float, check_same, check_shape, next_power_of_2
from megalite.kernels.plain.intervals import Intervals
from megalite.kernels.triton.dropout import keep_threshold, mix, row_word, signed_word
from megalite.kernels.triton.tables import choose

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
    BLOCK: tl.constexpr = triton.next_power_of_2(H)
    at = row + tl.arange(0, ROWS).to(tl.int64)
    dim = tl.arange(0, BLOCK)
    inside = (at < rows)[:, None] & (dim < H)[None, :]
    where = out_ptr + (at * stride)[:, None] + (head * H + dim)[None, :]
    tl.store(where, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def bounds(lo_ptr, up_ptr, row, rows, length, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of ROWS intervals: them, and the block-aligned walk: masked left, full, masked right.

    Rows past the end see nothing: their interval is empty and sits inside every other one.
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
    """Both row words of the dropout mask, of queries row ... row + ROWS - 1."""
    token = row + tl.arange(0, ROWS).to(tl.int64) + first
    plane = plane.to(tl.uint32)
    a = row_word(token, plane, key0.to(tl.uint32, bitcast=True))
    return a, row_word(token, plane, key1.to(tl.uint32, bitcast=True))


@triton.jit
def key_words(first, column, key0, COLUMNS: tl.constexpr):
    """Column words of the dropout mask, of keys column ... column + COLUMNS - 1."""
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
        """What the kernels take."""
        words = (signed_word(word) for word in self.key)
        places = (self.first_query, self.first_key, self.first_head)
        return (*places, *words, keep_threshold(self.p), 1.0 / (1.0 - self.p))


NO_DROP = (0, 0, 0, 0, 0, 0, 1.0)


@dataclass(frozen=True)
class Tiles:
    """Rows of queries and keys a program holds at once, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int
    two_loops: bool = True


def default_tiles(
    kernel: str, head_dim: int, dtype: torch.dtype, *, tma: bool = True, drop: bool = False
) -> Tiles:
    """Tiles of a kernel ("forward", "dq", "dkdv") by the committed table (`tables`).

    tma: loads by descriptors, not by pointers. drop: with dropout of the weights.
    """
    use = choose(
        f"attention_{kernel}",
        float32=dtype == torch.float32,
        head_dim=head_dim,
        descriptors=tma,
        dropout=drop,
    )
    since = tuple(int(part) for part in use.get("two_loops_since", "0").split("."))
    return Tiles(use["queries"], use["keys"], use["warps"], use["stages"], since <= _TRITON)


def _aligned(x: Tensor) -> bool:
    """Whether a descriptor can describe x: aligned rows, of which none overlaps another."""
    bytes_of, stride = x.element_size(), x.stride(0)
    return x.data_ptr() % 16 == 0 and stride * bytes_of % 16 == 0 and stride >= x.shape[1]


def flat(x_THD: Tensor) -> Tensor:
    """The 2-D view [T, heads * H] of [T, heads, H]; a copy where heads are not adjacent."""
    heads, head_dim = x_THD.shape[1:]
    adjacent = x_THD.stride(2) == 1 and (heads == 1 or x_THD.stride(1) == head_dim)
    if not adjacent:
        x_THD = x_THD.contiguous()
    return x_THD.as_strided((len(x_THD), heads * head_dim), (x_THD.stride(0), 1))


def operand(x: Tensor, rows: int, head_dim: int, tma: bool) -> Tensor | TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, head_dim]) if tma else x


def tma_fits(head_dim: int, *tensors: Tensor) -> bool:
    return head_dim == next_power_of_2(head_dim) and all(map(_aligned, tensors))


def check_inputs(q: Tensor, k: Tensor, v: Tensor, mask: Intervals) -> None:
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
    check_shape("attention", (queries,), lo=mask.lo, up=mask.up)
    check_shape("attention", (keys,), key_lo=mask.key_lo, key_up=mask.key_up)


def positive_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    if not scale > 0:
        raise ValueError(f"attention: scale={scale}, expected a positive number")
    return scale
