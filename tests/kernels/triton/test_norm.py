"""add + RMSNorm and add + LayerNorm in Triton against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.kernels.triton.norm import add_column_sums_, norm, norm_grad
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

EPS = 1e-5


def plain(
    s: Tensor, weight: Tensor, bias: Tensor | None, offset: float, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    mean = s.mean(1) if center else torch.zeros(len(s), dtype=s.dtype)
    n = s - mean[:, None]
    rstd = (n.square().mean(1) + EPS).rsqrt()
    y = n * rstd[:, None] * (weight + offset)
    return (y if bias is None else y + bias), mean[:, None], rstd[:, None]


def summed(partial: Tensor) -> Tensor:
    buffer = torch.zeros(partial.shape[1])
    add_column_sums_(buffer, partial)
    return buffer


CASES = [  # tokens, columns, add, center and bias, offset
    (5, 33, True, False, 0.0),
    (3, 1000, False, False, 1.0),
    (70, 64, True, True, 0.0),
    (1, 1025, True, True, 1.0),
    (6, 1, False, False, 0.0),
    (3, 8200, True, False, 0.0),  # the weight gradient has a pass of its own
    (3, 8200, False, True, 0.0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_norm_and_its_gradients(case: tuple, dtype: torch.dtype) -> None:
    tokens, columns, add, center, offset = case
    x = rows_of_wider(draw(tokens, columns, dtype=dtype)) + 0.5
    residual = draw(tokens, columns, dtype=dtype, seed=1) if add else None
    weight = draw(columns, dtype=dtype, seed=2)
    bias = draw(columns, dtype=dtype, seed=3) if center else None
    y, s, mean, rstd = norm(x, weight, bias, EPS, residual, offset=offset)
    assert torch.equal(s, x if residual is None else x + residual)
    s64, weight64 = exact(s), exact(weight)
    bias64 = None if bias is None else exact(bias)
    y64, mean64, rstd64 = plain(s64, weight64, bias64, offset, center)
    assert y.dtype == dtype
    assert_near(y, y64)
    assert_near(rstd, rstd64)
    if center:
        assert_near(mean, mean64)

    dy = rows_of_wider(draw(tokens, columns, dtype=dtype, seed=4))
    ds = draw(tokens, columns, dtype=dtype, seed=5) if add else None
    dx, dweights, dbiases = norm_grad(dy, s, weight, mean, rstd, ds, offset=offset, programs=2)
    loss = (y64 * dy.double()).sum() + (0 if ds is None else (s64 * ds.double()).sum())
    loss.backward()
    if columns > 1:  # a norm over one column is constant but for eps: nothing to compare
        assert_near(dx, s64.grad, backward=True)
    assert_near(summed(dweights), weight64.grad, backward=True)
    if bias64 is not None:
        assert dbiases is not None
        assert_near(summed(dbiases), bias64.grad, backward=True)


def test_column_sums_are_added_to_a_buffer() -> None:
    partial, (whole, buffer) = draw(37, 130), guarded(draw(130, seed=1))
    want = buffer.double() + partial.double().sum(0)
    add_column_sums_(buffer, partial)
    assert_near(buffer, want)
    assert_guards_untouched(whole)
    again = draw(130, seed=1)
    add_column_sums_(again, rows_of_wider(partial))
    assert torch.equal(again, buffer)
    with pytest.raises(ValueError, match=r"buffer has shape \(130,\), expected \(5,\)"):
        add_column_sums_(buffer, draw(2, 5))
    with pytest.raises(TypeError, match=r"partial torch.bfloat16; expected torch.float32"):
        add_column_sums_(buffer, partial.bfloat16())


@pytest.mark.parametrize("columns", [40, 8200])
def test_bits_do_not_depend_on_the_run(columns: int) -> None:
    x, residual, dy = (draw(50 if columns < 99 else 5, columns, seed=i) for i in range(3))
    weight, bias = draw(columns), draw(columns, seed=1)

    def run() -> list[Tensor | None]:
        y, s, mean, rstd = norm(x, weight, bias, EPS, residual)
        return [y, *norm_grad(dy, s, weight, mean, rstd)]

    assert_same_bits(run, overflow=columns < 99)


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    x, weight = torch.empty(0, 8), draw(8)
    y, s, _, rstd = norm(x, weight, None, EPS)
    assert y.shape == (0, 8)
    _, dweight, _ = norm_grad(y, s, weight, None, rstd)
    assert torch.equal(summed(dweight), torch.zeros(8))


def test_expanded_gradients_are_accepted() -> None:
    x, weight = draw(4, 16), draw(16)
    _, s, _, rstd = norm(x, weight, None, EPS)
    expanded = torch.tensor(2.0).expand(4, 16)
    dx, _, _ = norm_grad(expanded, s, weight, None, rstd)
    want, _, _ = norm_grad(expanded.contiguous(), s, weight, None, rstd)
    assert torch.equal(dx, want)


def test_rows_beyond_two_to_the_31_elements() -> None:
    """A row stride of 2^30: the third row lies past what 32 bits can address."""
    x = far_rows(draw(3, 16, dtype=torch.bfloat16))
    weight = torch.ones(16)
    y, _, _, _ = norm(x, weight, None, EPS)
    assert torch.equal(y, norm(x.contiguous(), weight, None, EPS)[0])


def test_errors_name_the_tensor_and_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"rms_norm: x is torch.float64.*backend=reference"):
        norm(draw(2, 4).double(), draw(4), None, EPS)
    with pytest.raises(ValueError, match=r"last dimension of x has stride 2.*contiguous"):
        norm(draw(4, 2).t(), draw(4), None, EPS)
    with pytest.raises(ValueError, match=r"weight has shape \(5,\), expected \(4,\)"):
        norm(draw(2, 4), draw(5), None, EPS)
    with pytest.raises(ValueError, match="1 to 16384"):
        norm(draw(1, 16385), draw(16385), None, EPS)
