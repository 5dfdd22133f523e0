"""Attention against a naive masked softmax in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalite import kernels
from tests.kernels.kit import DTYPES, STRIDES, assert_matches, draw, exact, with_strides

TOKENS, HEADS, HEAD_DIM = 11, 4, 6
DOCUMENTS = {
    "one": [0, 11],
    "two": [0, 4, 11],
    "one-token documents": [0, 1, 2, 10, 11],
    "equal": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
}


def naive_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds: list[int]) -> Tensor:
    """Every score, the forbidden ones masked out; key/value heads repeated for their queries."""
    tokens, heads, head_dim = q_TNH.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k_TKH, v_TKH))
    document = torch.zeros(tokens, dtype=torch.int64)
    for number, (start, stop) in enumerate(pairwise(bounds)):
        document[start:stop] = number
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    seen &= document[:, None] == document[None, :]
    scores = torch.einsum("tnh,snh->nts", q_TNH, k) / head_dim**0.5
    return torch.einsum("nts,snh->tnh", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("bounds", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_attention(bounds, kv_heads, dtype) -> None:
    check(bounds, kv_heads, dtype, "rows")


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("bounds", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_attention_of_any_strides(bounds, strides) -> None:
    check(bounds, 2, torch.float64, strides)


def test_sequences_of_a_microbatch_do_not_see_each_other() -> None:
    check([0, 5, 10], 4, torch.float64, "rows", tokens=10)


def check(bounds, kv_heads, dtype, strides, tokens=TOKENS) -> None:
    heads = (HEADS, kv_heads, kv_heads)
    values = [draw(tokens, n, HEAD_DIM, dtype=dtype, seed=i) for i, n in enumerate(heads)]
    inputs = [with_strides(x, strides).requires_grad_() for x in values]
    inputs64 = [exact(x) for x in inputs]
    (q, k, v), (q64, k64, v64) = inputs, inputs64
    upstream = with_strides(draw(tokens, HEADS, HEAD_DIM, dtype=dtype, seed=5), strides)

    out = kernels.attention(q, k, v, bounds)
    out64 = naive_attention(q64, k64, v64, bounds)
    grads = torch.autograd.grad(out, inputs, upstream)
    grads64 = torch.autograd.grad(out64, inputs64, upstream.double())

    assert out.dtype == dtype
    assert_matches(out, out64)
    for got, want in zip(grads, grads64, strict=True):
        assert got.dtype == dtype
        assert_matches(got, want)


def test_attention_takes_an_expanded_gradient() -> None:
    q, k, v = (draw(TOKENS, 4, HEAD_DIM, seed=i).requires_grad_() for i in range(3))
    kernels.attention(q, k, v, [0, 4, 11]).sum().backward()
    want = torch.autograd.grad(naive_attention(q, k, v, [0, 4, 11]).sum(), (q, k, v))
    for x, grad in zip((q, k, v), want, strict=True):
        assert_matches(x.grad, grad)


def test_scores_far_apart_stay_finite() -> None:
    q, k, v = (100 * draw(TOKENS, 4, HEAD_DIM, dtype=torch.float32, seed=i) for i in range(3))
    out = kernels.attention(q, k, v, [0, 4, 11])
    assert_matches(out, naive_attention(q.double(), k.double(), v.double(), [0, 4, 11]))
