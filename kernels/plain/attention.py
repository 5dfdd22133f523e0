"""Causal attention within documents in plain torch: whole, in a sliding window, with dropout.

Shapes: T tokens, N query heads, K key/value heads, H head dim, L tokens of a document. Everything
is differentiable by autograd. 16-bit tensors on CPU are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.plain.dropout import AttentionDropout, dropout, dropout_mask
from megalite.kernels.plain.intervals import check_documents

_WINDOW_BLOCK = 256  # queries that share one slice of keys under a sliding window


class DocumentMask(NamedTuple):
    """Causal attention within documents [cu[i], cu[i + 1]), at most `window` tokens back."""

    cu_seqlens: Sequence[int]
    window: int | None


def document_mask(
    cu_seqlens: Sequence[int], window: int | None, device: torch.device
) -> DocumentMask:
    """The mask for `document_attention`, the same one for all layers of a microbatch.

    cu_seqlens: document boundaries [0, ..., T]. Raises ValueError.
    """
    check_documents(cu_seqlens, window)
    return DocumentMask(cu_seqlens, window)


def document_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    mask: DocumentMask,
    drop: AttentionDropout | None = None,
    scale: float | None = None,
) -> Tensor:
    """out[T, N, H], differentiable by autograd; causal within the mask's documents."""
    return attention(q_TNH, k_TKH, v_TKH, mask.cu_seqlens, mask.window, drop, scale)


def attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Sequence[int],
    window: int | None = None,
    drop: AttentionDropout | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention within documents: out[T, N, H].

    cu_seqlens: document boundaries [0, ..., T]. A token sees itself and earlier tokens of its own
    document; with a `window` only the last `window` tokens, itself included. Query head n reads
    key/value head n // (N / K). scale: the factor of the scores, 1 / sqrt(H) by default. `drop`
    drops attention weights; that path holds L x L weights of every head in memory. Raises
    ValueError.
    """
    if q_TNH.device.type == "cpu" and q_TNH.dtype in (torch.bfloat16, torch.float16):
        q, k, v = q_TNH.float(), k_TKH.float(), v_TKH.float()
        return by_documents(q, k, v, cu_seqlens, window, drop, scale).to(q_TNH.dtype)
    return by_documents(q_TNH, k_TKH, v_TKH, cu_seqlens, window, drop, scale)


def by_documents(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Sequence[int],
    window: int | None = None,
    drop: AttentionDropout | None = None,
    scale: float | None = None,
) -> Tensor:
    """`attention` as torch computes it in the tensors' type; those of 16 bits are slow on CPU."""
    check_documents(cu_seqlens, window)
    if cu_seqlens[-1] != len(q_TNH):
        raise ValueError(
            f"attention: documents end at {cu_seqlens[-1]}, but there are {len(q_TNH)} tokens"
        )
    documents = [(start, stop) for start, stop in pairwise(cu_seqlens) if start < stop]
    lengths = [stop - start for start, stop in documents]

    # Documents of one length go side by side through one call. Others would need padding for that,
    # so each gets a call of its own.
    if not lengths:
        return q_TNH.clone()
    if len(set(lengths)) == 1:
        return _documents(q_TNH, k_TKH, v_TKH, lengths[0], window, drop, scale)
    parts = (x.split(lengths) for x in (q_TNH, k_TKH, v_TKH))
    drops = [_moved(drop, start) for start, _ in documents]
    return torch.cat(
        [
            _documents(q, k, v, len(q), window, d, scale)
            for q, k, v, d in zip(*parts, drops, strict=True)
        ]
    )


def cached_attention(
    q_BNH: Tensor,
    key_BKLH: Tensor,
    value_BKLH: Tensor,
    lengths: Sequence[int],
    scale: float | None = None,
) -> Tensor:
    """out[B, N, H] of one query for each of B texts, over the first lengths[b] of its L rows.

    The order of rows does not matter: a text's query sees all of them. Query head n reads key/value
    head n // (N / K). scale and types as in `attention`.
    """
    if q_BNH.device.type == "cpu" and q_BNH.dtype in (torch.bfloat16, torch.float16):
        q, key, value = q_BNH.float(), key_BKLH.float(), value_BKLH.float()
        return cached_attention(q, key, value, lengths, scale).to(q_BNH.dtype)
    texts, heads, head_dim = q_BNH.shape
    rows = max(lengths)
    seen = None
    if min(lengths) < rows:
        length_B = torch.tensor(lengths, device=q_BNH.device)
        seen = torch.arange(rows, device=q_BNH.device) < length_B.view(-1, 1, 1, 1)
    # The queries of a group go side by side over their one key head, as if they were tokens of it.
    q_BKgH = q_BNH.view(texts, key_BKLH.shape[1], -1, head_dim)
    out_BKgH = F.scaled_dot_product_attention(
        q_BKgH, key_BKLH[:, :, :rows], value_BKLH[:, :, :rows], attn_mask=seen, scale=scale
    )
    return out_BKgH.reshape(texts, heads, head_dim)


def _moved(drop: AttentionDropout | None, start: int) -> AttentionDropout | None:
    return None if drop is None else drop._replace(first_token=drop.first_token + start)


def _documents(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    length_tokens: int,
    window: int | None,
    drop: AttentionDropout | None,
    scale: float | None,
) -> Tensor:
    """Attention of documents of one length, side by side."""
    heads = (x.view(-1, length_tokens, *x.shape[1:]) for x in (q_TNH, k_TKH, v_TKH))
    q, k, v = (x.transpose(1, 2) for x in heads)
    if drop is not None:
        out = _with_dropout(q, k, v, window, drop, scale)
    elif window is not None and window < length_tokens:
        out = _windowed(q, k, v, window, scale)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2).reshape(q_TNH.shape)


def _seen(queries: range, keys: range, window: int | None, device: torch.device) -> Tensor:
    """bool [queries, keys]: the key is the query's own token or one of its window before it."""
    distance = (
        torch.arange(queries.start, queries.stop, device=device)[:, None]
        - torch.arange(keys.start, keys.stop, device=device)[None, :]
    )
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
    """Attention in blocks of queries, each over the keys that one of them sees.

    That takes L x (window + block) scores instead of L x L. All shapes [documents, heads, L, H].
    """
    grouped, length, parts = q.shape[1] != k.shape[1], q.shape[2], []
    for start in range(0, length, _WINDOW_BLOCK):
        queries = range(start, min(start + _WINDOW_BLOCK, length))
        keys = range(max(0, start - window + 1), queries.stop)
        block = slice(keys.start, keys.stop)
        parts.append(
            F.scaled_dot_product_attention(
                q[:, :, queries.start : queries.stop],
                k[:, :, block],
                v[:, :, block],
                attn_mask=_seen(queries, keys, window, q.device),
                scale=scale,
                enable_gqa=grouped,
            ).transpose(1, 2)
        )
    return torch.cat(parts, 1).transpose(1, 2)


def _with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    drop: AttentionDropout,
    scale: float | None,
) -> Tensor:
    """Attention with all weights in memory, where dropout can act on them.

    All shapes [documents, heads, L, H].
    """
    documents, heads, length, head_dim = q.shape
    group = heads // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    seen = _seen(range(length), range(length), window, q.device)
    factor = head_dim**-0.5 if scale is None else scale
    scores = (q @ k.transpose(2, 3)).mul_(factor).masked_fill_(~seen, -torch.inf)
    token = torch.arange(documents * length, device=q.device).view(documents, 1, length)
    token += drop.first_token
    plane = torch.arange(heads, device=q.device).view(1, heads, 1, 1) + drop.first_head
    keep = dropout_mask(drop.key, drop.p, token.unsqueeze(3), token.unsqueeze(2), plane)
    return dropout(scores.softmax(-1), keep, drop.p) @ v
