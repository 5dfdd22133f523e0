"""Dropout masks by the written recipe in numpy: shares no code with the product."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def mix(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def words(values: object) -> np.ndarray:
    return (np.asarray(values, dtype=np.uint64) & np.uint64(WORD)).astype(np.uint32)


def key_of(seed: int, step: int, layer: int, kind: str) -> tuple[int, int]:
    digest = hashlib.sha256(f"dropout/{seed}/{step}/{layer}/{kind}".encode()).digest()
    return tuple(np.frombuffer(digest[:8], dtype="<u4").tolist())


def mask(key, p: float, token, column, plane=0) -> Tensor:
    """Kept elements; token, column and plane are arrays of integers that broadcast."""
    token = np.asarray(token, dtype=np.uint64)
    low, high = words(token), words(token >> np.uint64(32))
    a, b = (mix(mix(mix(low ^ np.uint32(k)) + high) + words(plane)) for k in key)
    x = a ^ mix(words(column) ^ np.uint32(key[0]))
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = ((x ^ (x >> np.uint32(15))) + b) * np.uint32(0x846CA68B)
    return torch.from_numpy(x.astype(np.int32) >= round(p * 2**32) - 2**31)


def drop_rows(x: Tensor, p: float, at, layer: int, kind: str) -> Tensor:
    """Dropout of [T, D] whose first row is `at.first_token`; `at` None drops nothing."""
    if at is None or p == 0:
        return x
    token = at.first_token + np.arange(x.shape[0])[:, None]
    keep = mask(key_of(at.seed, at.step, layer, kind), p, token, np.arange(x.shape[1]))
    return x * keep / (1 - p)


def drop_weights(shares_nts: Tensor, p: float, at, layer: int) -> Tensor:
    """Dropout of attention weights [heads, queries, keys]."""
    if at is None or p == 0:
        return shares_nts
    heads, tokens, _ = shares_nts.shape
    index = at.first_token + np.arange(tokens)
    plane = np.arange(heads)[:, None, None]
    key = key_of(at.seed, at.step, layer, "attention")
    return shares_nts * mask(key, p, index[:, None], index, plane) / (1 - p)
