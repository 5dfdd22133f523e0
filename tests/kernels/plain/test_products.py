"""Matrix products and the sums of weight gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite import kernels
from megalite.kernels.plain import processor_products
from tests.kernels.kit import DTYPES, STRIDES, assert_matches, draw, relative_error, with_strides
from tests.tolerances import FLOAT32

SHAPES = [(1, 1, 1), (7, 5, 3), (33, 300, 17)]  # T, D, F


@pytest.fixture(params=["definition", "as it is", "MKL alone", "oneDNN"])
def products(request, monkeypatch) -> Any:
    """What multiplies: plain torch, or the quickest of this machine and of others."""
    if request.param == "MKL alone":
        monkeypatch.setattr(processor_products, "_multiplies_bfloat16", lambda: False)
        monkeypatch.setattr(processor_products, "_mkl_leaves_half", lambda: False)
    elif request.param == "oneDNN":
        monkeypatch.setattr(processor_products, "_mkl_leaves_half", lambda: True)
        monkeypatch.setattr(processor_products, "_SMALL_PRODUCT", 1)
    return kernels if request.param == "definition" else kernels.Kernels()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_and_its_input_gradient(shape, strides, dtype, products) -> None:
    tokens, width, features = shape
    x = with_strides(draw(tokens, width, dtype=dtype), strides)
    weight = with_strides(draw(features, width, dtype=dtype, seed=1), strides)
    dy = with_strides(draw(tokens, features, dtype=dtype, seed=2), strides)
    y = products.linear(x, weight)
    dx = products.linear_input_grad(dy, weight)
    assert y.dtype == dx.dtype == dtype
    assert_matches(y, x.double() @ weight.double().t())
    assert_matches(dx, dy.double() @ weight.double())


def test_products_of_sixteen_bits_are_rounded_once(products) -> None:
    """Long sums, sizes off the processor's tiles, and a bias as large as the sum."""
    x, weight = (draw(n, 2050, seed=n).add(0.5).to(torch.bfloat16) for n in (67, 130))
    whole = x.double() @ weight.double().t()
    bias = whole.mean(0).to(torch.bfloat16)
    assert_matches(products.linear(x, weight), whole)
    assert_matches(products.linear(x, weight, bias), whole + bias.double())
    assert_matches(products.linear(x, weight, bias.float()), whole + bias.double())
    dy = draw(67, 130, seed=4).add(0.5).to(torch.bfloat16)
    assert_matches(products.linear_input_grad(dy, weight), dy.double() @ weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("shape", SHAPES)
def test_weight_gradient_is_added_in_the_buffers_dtype(shape, strides, dtype, products) -> None:
    tokens, width, features = shape
    x = with_strides(draw(tokens, width, dtype=dtype), strides)
    dy = with_strides(draw(tokens, features, dtype=dtype, seed=2), strides)
    buffer = draw(features, width, seed=3).to(dtype if dtype == torch.float64 else torch.float32)
    want = buffer.double() + dy.double().t() @ x.double()
    products.accumulate_weight_grad_(buffer, dy, x)
    assert_matches(buffer, want)


def test_sixteen_bit_weight_gradient_is_never_rounded_to_sixteen_bits(products) -> None:
    x, dy = (draw(256, 8, dtype=torch.bfloat16, seed=s) for s in (0, 1))
    exact = dy.double().t() @ x.double()
    rounded = exact.to(torch.bfloat16)
    assert relative_error(rounded, exact) > 100 * FLOAT32  # the check below can tell
    buffer = torch.zeros(8, 8)
    for part in range(0, 256, 32):  # eight microbatches
        products.accumulate_weight_grad_(buffer, dy[part : part + 32], x[part : part + 32])
    assert relative_error(buffer, exact) <= FLOAT32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weight_gradient_of_an_expanded_upstream_gradient(dtype, products) -> None:
    x, weight = draw(6, 4, dtype=dtype), draw(3, 4, dtype=dtype)
    dy = torch.ones((), dtype=dtype).expand(6, 3)  # what sum().backward() sends
    buffer = torch.zeros(3, 4, dtype=dtype)
    products.accumulate_weight_grad_(buffer, dy, x)
    assert_matches(buffer, x.double().sum(0).expand(3, 4))
    assert_matches(products.linear_input_grad(dy, weight), weight.double().sum(0).expand(6, 4))


@pytest.mark.parametrize("strides", ["every_second", "expanded"])
def test_biases_and_matrices_of_any_strides(strides, products) -> None:
    """Where an operation looks at no strides, what lies between is not to be read."""
    x, weight, bias = draw(9, 40), draw(8, 40, seed=1), draw(8, seed=2)
    for shape in ((1,), (1, 8), (9, 8)):  # as torch.addmm takes them
        wide = draw(*shape, seed=3).float()
        got = products.linear(x.float(), weight.float(), wide)
        assert_matches(got, x.float().double() @ weight.float().double().t() + wide.double())
    x, weight, bias = (t.float() for t in (x, weight, bias))
    if strides == "expanded":
        bias = bias[:1].expand(8)
        weight = draw(47).float().unfold(0, 40, 1)  # rows that overlap
    else:
        bias = with_strides(bias, strides)
    assert_matches(
        products.linear(x, weight, bias), x.double() @ weight.double().t() + bias.double()
    )
    dy = draw(9, 8, seed=4).float()
    assert_matches(products.linear_input_grad(dy, weight), dy.double() @ weight.double())


def test_shapes_that_do_not_fit_are_refused(products) -> None:
    x, weight = torch.ones(30, 40), torch.ones(20, 41)
    with pytest.raises(RuntimeError, match="shape"):
        products.linear(x, weight)
    with pytest.raises(RuntimeError, match="shape"):
        products.linear_input_grad(x, weight)
    with pytest.raises(RuntimeError):
        products.accumulate_weight_grad_(torch.zeros(20, 40), torch.ones(30, 1), x)


def test_the_definition_can_be_compiled_and_differentiated_forward() -> None:
    x, weight = draw(70, 300).float(), draw(60, 300, seed=1).float()
    compiled = torch.compile(kernels.linear, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, weight), kernels.linear(x, weight))
    tangent = torch.func.jvp(lambda a: kernels.linear(a, weight), (x,), (x,))[1]
    assert_matches(tangent, x.double() @ weight.double().t())


@pytest.mark.parametrize("bias", [False, True])
def test_long_float32_products_and_their_autograd(bias, products) -> None:
    x, weight, dy = draw(70, 9000), draw(50, 9000, seed=1), draw(70, 50, seed=2)
    b = draw(50, seed=3) if bias else None
    leaves = [t.float().requires_grad_() for t in (x, weight, b) if t is not None]
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    want = exact_leaves[0] @ exact_leaves[1].t() + (exact_leaves[2] if bias else 0)
    want.backward(dy)
    y = products.linear(*leaves)
    y.backward(dy.float())
    with torch.no_grad():
        assert_matches(products.linear(*leaves), want)
    assert_matches(y, want)
    for got, wanted in zip(leaves, exact_leaves, strict=True):
        assert_matches(got.grad, wanted.grad)


def test_products_without_rows_or_sums(products) -> None:
    for tokens, width, features in ((0, 5, 7), (5, 0, 7), (5, 7, 0)):
        x, weight = torch.ones(tokens, width), torch.ones(features, width)
        assert torch.equal(products.linear(x, weight), torch.zeros(tokens, features))
        buffer, dy = torch.ones(features, width), torch.ones(tokens, features)
        products.accumulate_weight_grad_(buffer, dy, x)
        assert torch.equal(buffer, torch.ones(features, width))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", STRIDES)
def test_embedding_gradient(strides, dtype) -> None:
    row = torch.tensor([3, 0, 3, 6, 0, 3, 2, 6])  # rows come back, and not in order
    row[4], row[6] = -1, 7  # other ranks' tokens
    dy = with_strides(draw(8, 5, dtype=dtype), strides)
    buffer = draw(7, 5, seed=1).to(torch.float64 if dtype == torch.float64 else torch.float32)
    want = buffer.double()
    for token in range(8):
        if 0 <= row[token] < 7:
            want[row[token]] += dy[token].double()
    untouched = buffer[[1, 2, 4, 5]].clone()
    kernels.embedding_grad_(buffer, dy, row)
    assert_matches(buffer, want)
    assert torch.equal(buffer[[1, 2, 4, 5]], untouched)


def test_embedding_gradient_of_a_frequent_token_is_summed_in_float32() -> None:
    buffer = torch.full((2, 3), 0.125)
    dy = torch.ones(1000, 3, dtype=torch.bfloat16)  # a 16-bit sum stops growing at 256
    kernels.embedding_grad_(buffer, dy, torch.zeros(1000).long())
    assert buffer.tolist() == [[1000.125] * 3, [0.125] * 3]
