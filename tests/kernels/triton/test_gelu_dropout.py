"""Bias + GeLU, squared ReLU against float64, and dropout against the bits of the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.plain import dropout as reference_dropout
from megalite.kernels.triton.dropout import dropout
from megalite.kernels.triton.gelu import gelu, gelu_backward_, gelu_grad, relu2, relu2_grad
from megalite.kernels.triton.norm import add_column_sums_
from tests.kernels.triton.kit.inputs import (
    DTYPES,
    assert_guards_untouched,
    assert_near,
    assert_same_bits,
    draw,
    exact,
    far_rows,
    guarded,
    rows_of_wider,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("erf", [False, True])
@pytest.mark.parametrize(("tokens", "columns", "with_bias"), [(11, 37, True), (2, 1030, False)])
def test_gelu_and_its_gradient_in_place(
    tokens: int, columns: int, with_bias: bool, erf: bool, dtype: torch.dtype
) -> None:
    whole, h = guarded(rows_of_wider(2 * draw(tokens, columns, dtype=dtype)))
    bias = draw(columns, dtype=dtype, seed=1) if with_bias else None
    h64 = exact(h)
    bias64 = None if bias is None else exact(bias)
    z64 = h64 if bias64 is None else h64 + bias64
    want = F.gelu(z64, approximate="none" if erf else "tanh")
    assert_near(gelu(h, bias, erf=erf), want)
    da = rows_of_wider(draw(tokens, columns, dtype=dtype, seed=2))
    want.backward(da.double())
    kept = h.clone()
    partial = gelu_backward_(h, da, bias, erf=erf, programs=2)
    assert_near(h, h64.grad, backward=True)
    assert_guards_untouched(whole)
    if bias64 is not None:
        assert partial is not None
        dbias = torch.zeros(columns)
        add_column_sums_(dbias, partial)
        assert_near(dbias, bias64.grad, backward=True)
    dh, again, summed = gelu_grad(da, kept, True, bias, erf=erf)
    assert dh is kept
    assert torch.equal(dh, h)
    assert_near(again, want)
    assert (summed is None) == (bias64 is None)
    if bias64 is not None:
        assert_near(summed, bias64.grad, backward=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_relu_and_its_gradient_in_place(dtype: torch.dtype) -> None:
    whole, h = guarded(rows_of_wider(2 * draw(3, 1030, dtype=dtype)))
    h64 = exact(h)
    want = F.relu(h64).square()
    a = relu2(h)
    assert_near(a, want)
    da = rows_of_wider(draw(3, 1030, dtype=dtype, seed=2))
    want.backward(da.double())
    dh, again = relu2_grad(da, h, recompute=True)
    assert dh is h
    assert_near(h, h64.grad, backward=True)
    assert again is not None
    assert torch.equal(again, a)
    assert_guards_untouched(whole)
    assert relu2(torch.tensor([[torch.nan, -1.0]])).isnan().tolist() == [[True, False]]


def test_gelu_of_extreme_far_and_absent_rows() -> None:
    extreme = torch.tensor([[-1e4, 1e4, -60.0, 60.0]])
    for erf in (False, True):
        assert gelu(extreme, erf=erf).tolist() == [[0, 1e4, 0, 60]]
        work = extreme.clone()
        gelu_backward_(work, torch.ones(()).expand(1, 4), erf=erf)
        assert work.tolist() == [[0, 1, 0, 1]]
    near = draw(3, 16, dtype=torch.bfloat16)
    assert torch.equal(gelu(far_rows(near)), gelu(near))
    assert gelu(torch.empty(0, 4)).shape == (0, 4)
    partial = gelu_backward_(torch.empty(0, 4), torch.empty(0, 4), torch.ones(4))
    assert partial is not None
    assert (partial == 0).all()


def test_gelu_bits_and_errors() -> None:
    h, da, bias = draw(9, 600), draw(9, 600, seed=1), draw(600)

    def run() -> list[Tensor | None]:
        work = h.clone()
        return [gelu(h, bias), gelu_backward_(work, da, bias, programs=2), work]

    assert_same_bits(run)
    with pytest.raises(ValueError, match="types must be the same"):
        gelu_backward_(h, da.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("key", "p", "first_token"),
    [
        ((0, 0), 0.5, 0),
        ((123, 2**32 - 5), 0.1, 2**32 - 2),
        ((2**31, 2**31 - 1), 0.9, 2**40 + 3),
        ((1, 1), 0.0, 1),
    ],
)
def test_dropout_gives_the_bits_of_the_reference(
    key: tuple[int, int], p: float, first_token: int, dtype: torch.dtype
) -> None:
    x = draw(4, 1100, dtype=dtype)
    token = torch.arange(first_token, first_token + 4).unsqueeze(1)
    keep = reference_dropout.dropout_mask(key, p, token, torch.arange(1100))
    want = reference_dropout.dropout(x, keep, p)
    for rows in (x, rows_of_wider(x)):
        got, _ = dropout(rows, key, p, first_token)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_dropout_bits_and_errors() -> None:
    x = draw(3, 70)
    # the words of the mask wrap by design: no overflow checks here
    assert_same_bits(lambda: [*dropout(x, (5, 6), 0.3)], overflow=False)
    expanded = torch.ones(()).expand(3, 70)
    assert torch.equal(
        dropout(expanded, (5, 6), 0.3)[0], dropout(torch.ones(3, 70), (5, 6), 0.3)[0]
    )
    with pytest.raises(ValueError, match=r"p=1\.0, expected 0 <= p < 1"):
        dropout(x, (5, 6), 1.0)
    with pytest.raises(ValueError, match="not a 32-bit word"):
        dropout(x, (5, 2**32), 0.5)
