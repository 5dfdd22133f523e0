"""Sliding windows and dropped attention weights against a naive softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite import kernels
from megalite.kernels.plain import attention as reference_attention
from tests.kernels.kit import DTYPES, assert_matches, draw, exact
from tests.model.kit import masks

KEY = (123, 2**32 - 5)


def naive(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], window, drop) -> Tensor:
    """Every score of every token with every other, the forbidden ones masked out."""
    tokens, heads, head_dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    index = torch.arange(tokens)
    document = torch.bucketize(index, torch.tensor(bounds[1:]), right=True)
    distance = index[:, None] - index[None, :]
    seen = (distance >= 0) & (document[:, None] == document[None, :])
    if window is not None:
        seen &= distance < window
    scores = torch.einsum("tnh,snh->nts", q, k) / head_dim**0.5
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    if drop is not None:
        place = drop.first_token + np.arange(tokens)
        plane = drop.first_head + np.arange(heads)[:, None, None]
        keep = masks.mask(drop.key, drop.p, place[:, None], place, plane)
        shares = shares * keep / (1 - drop.p)
    return torch.einsum("nts,snh->tnh", shares, v)


def check(
    tokens, heads, kv_heads, bounds, window, drop=None, dtype=torch.float64, scale=None
) -> None:
    shapes = (heads, kv_heads, kv_heads)
    inputs = [
        draw(tokens, n, 6, dtype=dtype, seed=i).requires_grad_() for i, n in enumerate(shapes)
    ]
    inputs64 = [exact(x) for x in inputs]
    (q, k, v), (q64, k64, v64) = inputs, inputs64
    upstream = draw(tokens, heads, 6, dtype=dtype, seed=5)
    out = kernels.attention(q, k, v, bounds, window, drop, scale)
    # a factor of the scores is one of the queries
    turned64 = q64 if scale is None else q64 * scale * 6**0.5
    out64 = naive(turned64, k64, v64, bounds, window, drop)
    assert out.dtype == dtype
    assert_matches(out, out64)
    grads = torch.autograd.grad(out, inputs, upstream)
    for got, want in zip(
        grads, torch.autograd.grad(out64, inputs64, upstream.double()), strict=True
    ):
        assert_matches(got, want)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("drop", [None, kernels.AttentionDropout(0.4, (3, 5), 2, 1)])
@pytest.mark.parametrize("bounds", [[0, 13], [0, 4, 13]])
def test_scores_have_the_factor_that_is_given(bounds, drop, window) -> None:
    check(13, 4, 2, bounds, window, drop, scale=0.7)


DOCUMENTS = [[0, 13], [0, 4, 13], [0, 1, 2, 12, 13], list(range(14))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [2, 3, 12, 13, 99])
@pytest.mark.parametrize("bounds", DOCUMENTS, ids=str)
def test_window(bounds, window, dtype) -> None:
    check(13, 4, 2, bounds, window, dtype=dtype)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7, 20])
@pytest.mark.parametrize("block", [1, 3, 4])
def test_window_over_several_blocks_of_queries(block, window, monkeypatch) -> None:
    monkeypatch.setattr(reference_attention, "_WINDOW_BLOCK", block)
    check(11, 2, 1, [0, 11], window)
    check(22, 2, 2, [0, 11, 22], window)


def test_window_longer_than_a_block() -> None:
    check(700, 1, 1, [0, 700], 300)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("bounds", [*DOCUMENTS, [0, 6, 13]], ids=str)
def test_dropped_weights(bounds, window, kv_heads) -> None:
    drop = kernels.AttentionDropout(0.3, KEY, first_token=2**32 - 6, first_head=8)
    check(13, 4, kv_heads, bounds, window, drop)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_dropped_weights_in_lower_precision(dtype) -> None:
    check(13, 4, 2, [0, 5, 13], None, kernels.AttentionDropout(0.5, KEY, 7, 0), dtype)


def test_heads_and_tokens_of_a_part_are_dropped_as_in_the_whole() -> None:
    """What one tp rank (heads 2, 3) or one microbatch (tokens 8 to 15) drops."""
    q, k, v = (draw(16, 4, 6, seed=i) for i in range(3))
    bounds = [0, 8, 16]
    whole = kernels.attention(q, k, v, bounds, None, kernels.AttentionDropout(0.4, KEY, 100, 0))
    drop = kernels.AttentionDropout(0.4, KEY, 100, 2)
    part = kernels.attention(q[:, 2:], k[:, 2:], v[:, 2:], bounds, None, drop)
    assert_matches(part, whole[:, 2:])
    drop = kernels.AttentionDropout(0.4, KEY, 108, 0)
    part = kernels.attention(q[8:], k[8:], v[8:], [0, 8], None, drop)
    assert_matches(part, whole[8:])
