"""Interval masks of attention: query i sees keys lo[i] <= j < up[i]. Plain torch, no host sync.

Causal order, packed documents, sliding windows, both directions and chunks of a ring are all such
intervals, and lo and up never decrease with i. The backward of keys needs the same mask by keys:
key j is seen by queries key_lo[j] <= i < key_up[j]. All four are int32 vectors of fixed length, so
graphs and compilers see fixed shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Intervals:
    """The mask of one attention call: by queries (lo, up) and by keys (key_lo, key_up).

    is_cut: True if every bound is within 0 and the number of keys or queries, as kernels require.
    """

    lo: Tensor
    up: Tensor
    key_lo: Tensor
    key_up: Tensor
    is_cut: bool = False

    def cut(self, queries: int, keys: int) -> Intervals:
        """The same mask with bounds clamped to this number of queries and keys."""
        if self.is_cut:
            return self
        return Intervals(
            self.lo.clamp(0, keys),
            self.up.clamp(0, keys),
            self.key_lo.clamp(0, queries),
            self.key_up.clamp(0, queries),
            is_cut=True,
        )

    def chunk(self, query_start: int, queries: int, key_start: int, keys: int) -> Intervals:
        """The mask between a piece of the queries and a piece of the keys, in local indexes."""
        q, k = slice(query_start, query_start + queries), slice(key_start, key_start + keys)
        return Intervals(
            (self.lo[q] - key_start).clamp(0, keys),
            (self.up[q] - key_start).clamp(0, keys),
            (self.key_lo[k] - query_start).clamp(0, queries),
            (self.key_up[k] - query_start).clamp(0, queries),
            is_cut=True,
        )


def check_documents(cu_seqlens: Sequence[int], window: int | None) -> None:
    """Raise ValueError unless cu_seqlens is [0, ...], never decreasing, and window at least 1."""
    falling = any(stop < start for start, stop in pairwise(cu_seqlens))
    if not len(cu_seqlens) or cu_seqlens[0] != 0 or falling:
        raise ValueError(
            f"attention: document boundaries {_shown(cu_seqlens)}, expected [0, ..., tokens], none "
            "below the one before it"
        )
    if window is not None and window < 1:
        raise ValueError(f"attention: window={window}, expected at least 1 (a token sees itself)")


def _shown(cu_seqlens: Sequence[int]) -> str:
    """The boundaries for a message: the first eight."""
    first = ", ".join(str(bound) for bound in cu_seqlens[:8])
    return f"[{first}{', ...' if len(cu_seqlens) > 8 else ''}]"


def _check_bounds(cu_seqlens: Tensor, num_tokens: int, window: int | None) -> None:
    """Raise TypeError, ValueError. Values are read on CPU only: elsewhere that would wait."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"attention: cu_seqlens is a {type(cu_seqlens).__name__}, expected a tensor on the "
            "device, such as torch.tensor([0, 100, 250])"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"attention: cu_seqlens is {cu_seqlens.dtype}, expected int32 or int64")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens) or num_tokens < 0:
        raise ValueError(
            f"attention: cu_seqlens has shape {tuple(cu_seqlens.shape)} for {num_tokens} tokens, "
            "expected (documents + 1) for 0 or more"
        )
    values = [0] if torch.compiler.is_compiling() else _values_on_cpu(cu_seqlens)
    check_documents(values, window)
    if values[-1] > num_tokens:
        raise ValueError(
            f"attention: documents end at {values[-1]}, but there are {num_tokens} tokens"
        )


def _values_on_cpu(cu_seqlens: Tensor) -> list[int]:
    """The boundaries as a list if they can be read without waiting, else [0], which is valid."""
    if cu_seqlens.device.type != "cpu" or type(cu_seqlens) is not Tensor:
        return [0]
    try:
        values: list[int] = cu_seqlens.tolist()
    except RuntimeError:  # within vmap
        return [0]
    return values


def document_intervals(
    cu_seqlens: Tensor, num_tokens: int, *, causal: bool = True, window: int | None = None
) -> Intervals:
    """The mask in which tokens see tokens of their own document, none after them if causal.

    window: only tokens at a smaller distance. cu_seqlens: document boundaries [0, ..., n] on the
    device, n <= num_tokens; tokens from n on are padding that sees no token and that none sees.
    Raises TypeError, ValueError.
    """
    _check_bounds(cu_seqlens, num_tokens, window)

    # The document of each token is looked up on the device: the host never reads the boundaries.
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

    # Padding gets empty intervals at n, so that lo and up do not decrease there either.
    inside = document <= last
    padding = cu_seqlens[-1]
    lo, up, key_lo, key_up = (
        torch.where(inside, x, padding).to(torch.int32) for x in (lo, up, key_lo, key_up)
    )
    return Intervals(lo, up, key_lo, key_up).cut(num_tokens, num_tokens)
