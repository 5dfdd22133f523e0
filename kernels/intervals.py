"""Interval masks of attention: query i sees keys lo[i] <= j < up[i]. Plain torch, no host sync.

Causal order, packed documents, sliding windows, both directions and chunks of a ring are all such
intervals, with lo and up never falling. The backward of keys needs the same mask by columns: key j
is seen by queries lo[j] <= i < up[j] of the transposed pair. All four are int32 vectors of fixed
length, so that graphs and compilers see fixed shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Intervals:
    """The mask of one attention call: by queries (lo, up) and by keys (key_lo, key_up)."""

    lo: Tensor
    up: Tensor
    key_lo: Tensor
    key_up: Tensor

    def chunk(self, query_start: int, queries: int, key_start: int, keys: int) -> Intervals:
        """The mask between a piece of the queries and a piece of the keys, in local indexes."""
        q, k = slice(query_start, query_start + queries), slice(key_start, key_start + keys)
        return Intervals(
            (self.lo[q] - key_start).clamp(0, keys),
            (self.up[q] - key_start).clamp(0, keys),
            (self.key_lo[k] - query_start).clamp(0, queries),
            (self.key_up[k] - query_start).clamp(0, queries),
        )


def document_intervals(
    cu_seqlens: Tensor, num_tokens: int, *, causal: bool = True, window: int | None = None
) -> Intervals:
    """Tokens see tokens of their own document, none after them if causal.

    window: only tokens at a smaller distance. cu_seqlens: document boundaries [0, ..., n] on the
    device, n <= num_tokens; tokens from n on are padding that sees nothing and is seen by none.
    """
    if window is not None and window < 1:
        raise ValueError(f"attention: window={window}, expected at least 1 (a token sees itself)")
    token = torch.arange(num_tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True)  # 1 + index of its document
    last = len(cu_seqlens) - 1
    start = cu_seqlens[document - 1]
    stop = cu_seqlens[document.clamp_max(last)]
    lo, up = start, stop
    key_lo, key_up = start, stop
    if window is not None:
        lo, up = torch.maximum(start, token - window + 1), torch.minimum(stop, token + window)
        key_lo, key_up = lo, up
    if causal:
        up = torch.minimum(up, token + 1)
        key_lo = torch.maximum(key_lo, token)
    inside = document <= last
    padding = cu_seqlens[-1]
    lo, up, key_lo, key_up = (
        torch.where(inside, x, padding).to(torch.int32) for x in (lo, up, key_lo, key_up)
    )
    return Intervals(lo, up, key_lo, key_up)
