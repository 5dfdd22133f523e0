"""Dropout in Triton with the counter-based mask of plain/dropout.py, bit for bit.

The mask is computed where it is used and never stored; the gradient is the same function.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.arguments import cdiv, check_float, rows_readable
from megalite.kernels.plain.dropout import Key
from megalite.kernels.triton.launch import prepared
from megalite.kernels.triton.tables import choose


@triton.jit
def mix(x):
    """A bijection of uint32 words."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def row_word(token, plane, key):
    """The hash of a 64-bit token and a uint32 plane with one word of the key."""
    x = mix(token.to(tl.uint32) ^ key)
    x = mix(x + (token >> 32).to(tl.uint32))
    return mix(x + plane)


@triton.jit
def kept(a, b, c, threshold):
    """True if the element with row words a and b and column word c is kept."""
    x = a ^ c
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += b
    x *= 0x846CA68B
    return x.to(tl.int32, bitcast=True) >= threshold


@prepared
@triton.jit(do_not_specialize=["first_token", "key0", "key1", "threshold"])
def _dropout_kernel(
    x_ptr,
    y_ptr,
    num_columns,
    x_stride,
    y_stride,
    first_token,
    key0,
    key1,
    threshold,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns

    # integers that are negative as int32 are the words' bits: a bitcast, not a conversion
    word0 = key0.to(tl.uint32, bitcast=True)
    word1 = key1.to(tl.uint32, bitcast=True)
    token = row + first_token
    plane = (token * 0).to(tl.uint32)
    a = row_word(token, plane, word0)
    b = row_word(token, plane, word1)
    keep = kept(a, b, mix(column.to(tl.uint32) ^ word0), threshold)

    # x * 0 and not 0, so that infinities and NaN become NaN as in the reference
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(keep, x, x * 0.0) * scale
    tl.store(y_ptr + row * y_stride + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def signed_word(word: int) -> int:
    """A 32-bit word as the int32 of the same bits. Raises ValueError for another number."""
    if not 0 <= word < 1 << 32:
        raise ValueError(f"dropout: key word {word} is not a 32-bit word")
    return word - (1 << 32) if word >= 1 << 31 else word


def keep_threshold(p: float) -> int:
    """The threshold of `kept` for a probability p: the least int32 of a word that is kept.

    Raises ValueError unless 0 <= p < 1.
    """
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p={p}, expected 0 <= p < 1")
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def dropout(
    x_TD: Tensor, key: Key, p: float, first_token: int = 0, keep_TD: Tensor | None = None
) -> tuple[Tensor, None]:
    """(x / (1 - p) where kept, None: no mask is kept or used). The gradient is this function, too.

    Row t is token first_token + t. p, key: as in `plain.dropout`. Raises TypeError, ValueError.
    """
    check_float("dropout", x=x_TD)
    x_TD = rows_readable(x_TD)
    tokens, columns = x_TD.shape
    words = [signed_word(word) for word in key]  # checks the key, for an empty x as well

    y_TD = x_TD.new_empty(tokens, columns)
    if y_TD.numel():
        use = choose("dropout")
        _dropout_kernel[(tokens, cdiv(columns, use["block"]))](
            x_TD,
            y_TD,
            columns,
            x_TD.stride(0),
            columns,
            first_token,
            *words,
            keep_threshold(p),
            1.0 / (1.0 - p),
            **use["launch"],
        )
    return y_TD, None
