"""Dropout masks as a function of counters: no generator, no state, the same mask at every layout.

The recipe, in unsigned 32-bit words that wrap (`>>` shifts zeros in):

    mix(x):   x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    a = mix(mix(mix(low(token) ^ k0) + high(token)) + plane)
    b = mix(mix(mix(low(token) ^ k1) + high(token)) + plane)
    c = mix(low(column) ^ k0)
    x = a ^ c;  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x += b;  x *= 0x846ca68b
    kept if x, read as two's complement, is at least round(p * 2^32) - 2^31

(k0, k1) is the key of one use of dropout in one step. token and column are 64-bit counters, low
and high their halves; plane separates elements of equal token and column (attention heads).
`mix` is a bijection, so up to 2^32 tokens of one plane never share a row, nor columns a value.
The multipliers are those of Chris Wellons' lowbias32. Written here in int32 tensors, whose
products wrap; a kernel in any language gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Key = tuple[int, int]  # two 32-bit words

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)  # as int32


class AttentionDropout(NamedTuple):
    """Dropout of attention weights: probability, key, and the call's first token and head.

    The mask of weight (query i, key j, head n) has token first_token + i, column first_token + j
    and plane first_head + n, with i and j counted over the call's tokens.
    """

    p: float
    key: Key
    first_token: int
    first_head: int


def _shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits of int32 with zeros shifted in."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix_(x: Tensor) -> Tensor:
    """mix(x) of the recipe, in place."""
    x ^= _shift(x, 16)
    x *= _FIRST
    x ^= _shift(x, 15)
    x *= _SECOND
    x ^= _shift(x, 16)
    return x


def _low(x: Tensor) -> Tensor:
    """The low 32 bits of each int64, as int32."""
    return x.to(torch.int32)


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _row(token: Tensor, plane: Tensor, word: int) -> Tensor:
    """a or b of the recipe: the hash of token and plane with one word of the key."""
    x = _mix_(_low(token) ^ _signed(word))
    x = _mix_(x + _low(token >> 32))
    return _mix_(x + _low(plane))


def check_dropout(p: float, key: Key) -> None:
    """Raise ValueError unless 0 <= p < 1 and the key is two words of 32 bits."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p={p}, expected 0 <= p < 1")
    words = key if isinstance(key, (tuple, list)) else ()
    if len(words) != 2 or not all(0 <= word < 1 << 32 for word in words):
        raise ValueError(f"dropout: key={key}, expected two words of 32 bits, 0 to 2^32 - 1")


def dropout_mask(
    key: Key, p: float, token: Tensor, column: Tensor, plane: Tensor | None = None
) -> Tensor:
    """True where an element is kept, with probability 1 - p: bool, the broadcast of the inputs.

    token, column, plane: int64 tensors that broadcast against each other; plane None is 0. Raises
    ValueError.
    """
    check_dropout(p, key)
    plane = token.new_zeros(()) if plane is None else plane
    a, b = (_row(token, plane, word) for word in key)
    x = a ^ _mix_(_low(column) ^ _signed(key[0]))
    x ^= _shift(x, 16)
    x *= _FIRST
    x ^= _shift(x, 15)
    x += b
    x *= _SECOND
    return x >= min(round(p * 2**32), 2**32 - 1) - 2**31


def dropout(x_TD: Tensor, keep_TD: Tensor, p: float) -> Tensor:
    """x / (1 - p) where kept, 0 elsewhere. The gradient is this function, too."""
    return (x_TD * keep_TD).mul_(1 / (1 - p))


def dropout_rows(
    x_TD: Tensor, key: Key, p: float, first_token: int = 0, keep_TD: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(x / (1 - p) where kept, the mask); row t is token first_token + t.

    keep_TD: the mask of an earlier call, None to compute it. The gradient is this function, too.
    """
    if keep_TD is None:
        token = torch.arange(first_token, first_token + len(x_TD), device=x_TD.device)
        column = torch.arange(x_TD.shape[1], device=x_TD.device)
        keep_TD = dropout_mask(key, p, token.unsqueeze(1), column)
    return dropout(x_TD, keep_TD, p), keep_TD
