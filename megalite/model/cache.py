"""Keys and values of the tokens so far, so that a text's next token takes one row of the model.

A layer hands its rotated keys and values to `Cache.attend`, which keeps them and attends: over the
texts themselves while they are read, later over what is kept. Under tensor parallelism each rank
keeps its own heads. Texts never see each other.

Shapes: B texts, T tokens of a forward, n query and k key/value heads of this rank, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite import kernels


class _Places(NamedTuple):
    """Places at which tokens are kept: token [M] of the forward, its text [M] and row [M]."""

    token: Tensor
    text: Tensor
    row: Tensor


class Cache:
    """The keys and values of B texts of at most `max_tokens` tokens, by layer.

    The first forward reads whole texts, of different lengths; each later one adds a token to every
    text. Of a layer with a window only the last `window` tokens are kept, in a ring.
    """

    def __init__(self, num_texts: int, max_tokens: int) -> None:
        self.lengths = [0] * num_texts  # tokens of each text so far
        self._max_tokens = max_tokens
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # [B, k, rows, H] each
        self._counts: Sequence[int] = ()
        self._reads_texts = True
        self._places: dict[int, _Places | int] = {}  # of this forward's tokens, by number of rows

    @property
    def is_empty(self) -> bool:
        """True before the first forward."""
        return not any(self.lengths)

    def begin(self, counts: Sequence[int]) -> list[int]:
        """Begin a forward of `counts` more tokens of each text; the tokens of each before it.

        Every count is 1 unless it is the first forward.
        """
        self._reads_texts, before = self.is_empty, self.lengths
        assert len(counts) == len(before), (counts, before)
        assert self._reads_texts or set(counts) == {1}, "texts grow by a token at a time"
        self._counts, self._places = counts, {}
        self.lengths = [length + count for length, count in zip(before, counts, strict=True)]
        assert max(self.lengths) <= self._max_tokens, (self.lengths, self._max_tokens)
        return before

    def attend(
        self,
        layer: int,
        q_TnH: Tensor,
        k_TkH: Tensor,
        v_TkH: Tensor,
        mask: Any,
        window: int | None,
        ops: kernels.Kernels,
        scale: float | None = None,
    ) -> Tensor:
        """Keep keys and values of this forward's tokens; attention [T, n, H] of its queries.

        mask: that of the texts, in the kernels' form, for the first forward. scale: as in
        `kernels.attention`.
        """
        if layer not in self._layers:
            rows = min(self._max_tokens, window or self._max_tokens)
            shape = (len(self.lengths), k_TkH.shape[1], rows, k_TkH.shape[2])
            self._layers[layer] = (k_TkH.new_zeros(shape), v_TkH.new_zeros(shape))
        keys, values = self._layers[layer]
        rows = keys.shape[2]
        at = self._places.get(rows)
        if at is None:
            at = self._places[rows] = self._place(rows, keys.device)
        if isinstance(at, int):
            keys[:, :, at], values[:, :, at] = k_TkH, v_TkH
        else:
            keys[at.text, :, at.row] = k_TkH[at.token]
            values[at.text, :, at.row] = v_TkH[at.token]
        if self._reads_texts:
            return ops.attention(q_TnH, k_TkH, v_TkH, mask, None, scale)
        lengths = [min(length, rows) for length in self.lengths]
        return kernels.cached_attention(q_TnH, keys, values, lengths, scale)

    def keep(self, texts: Sequence[int]) -> None:
        """Go on with these of the texts alone, in this order."""
        self.lengths = [self.lengths[text] for text in texts]
        for layer, (keys, values) in self._layers.items():
            index = torch.tensor(texts, dtype=torch.int64, device=keys.device)
            self._layers[layer] = (keys[index], values[index])

    def _place(self, rows: int, device: torch.device) -> _Places | int:
        """The rows, of `rows`, that keep this forward's tokens: position p in row p mod rows.

        A number is the row of one token of every text, where the texts are of one length.
        """
        if not self._reads_texts and len(set(self.lengths)) == 1:
            return (self.lengths[0] - 1) % rows
        token, text, row, first = [], [], [], 0
        for number, (length, count) in enumerate(zip(self.lengths, self._counts, strict=True)):
            for position in range(max(length - count, length - rows), length):
                token.append(first + position - (length - count))
                text.append(number)
                row.append(position % rows)
            first += count
        return _Places(*(torch.tensor(x, device=device) for x in (token, text, row)))
