"""RMSNorm, activations and rotary positions against autograd of their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megalite import kernels
from tests.kernels.kit import (
    DTYPES,
    STRIDES,
    assert_matches,
    draw,
    exact,
    relative_error,
    with_strides,
)
from tests.tolerances import FLOAT32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", [*STRIDES, "expanded"])
@pytest.mark.parametrize("shape", [(1, 3), (7, 5), (13, 96)])
def test_rms_norm(shape, strides, dtype) -> None:
    x = with_strides(draw(*shape, dtype=dtype), strides)
    weight = draw(shape[1], dtype=dtype, seed=1)
    dy = with_strides(draw(*shape, dtype=dtype, seed=2), strides)
    if strides == "expanded":
        dy = dy[:1, :1].expand(shape)
    x64, weight64 = exact(x), exact(weight)
    y64 = x64 / torch.sqrt(x64.square().mean(1, keepdim=True) + 1e-3) * weight64
    y64.backward(dy.double())
    before = x.clone(), dy.clone()

    y, rstd = kernels.rms_norm(x, weight, 1e-3)
    dx, dweight = kernels.rms_norm_grad(dy, x, weight, rstd)

    assert y.dtype == dx.dtype == dtype
    assert rstd.dtype == dweight.dtype != torch.bfloat16
    assert_matches(y, y64)
    assert_matches(dx, x64.grad)
    assert_matches(dweight, weight64.grad)
    assert torch.equal(x, before[0])
    assert torch.equal(dy, before[1])


@pytest.mark.parametrize("size", [1e-20, 1e15])
def test_rms_norm_of_extreme_rows(size) -> None:
    x = (draw(3, 8) * size).float()
    y, rstd = kernels.rms_norm(x, torch.ones(8), 1e-5)
    want = x.double() / torch.sqrt(x.double().square().mean(1, keepdim=True) + 1e-5)
    assert_matches(y, want)
    dx, dweight = kernels.rms_norm_grad(torch.ones(3, 8), x, torch.ones(8), rstd)
    assert dx.isfinite().all()
    assert_matches(dweight, want.sum(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", [*STRIDES, "expanded"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (5, 34)])
def test_swiglu(shape, strides, dtype) -> None:
    tokens, width = shape
    h = with_strides(draw(tokens, 2 * width, dtype=dtype), strides)
    da = with_strides(draw(tokens, width, dtype=dtype, seed=1), strides)
    if strides == "expanded":
        da = da[:1, :1].expand(shape)
    h64 = exact(h)
    gate, up = h64[:, :width], h64[:, width:]
    a64 = gate / (1 + torch.exp(-gate)) * up
    a64.backward(da.double())
    before = h.clone(), da.clone()

    a = kernels.swiglu(h)
    assert torch.equal(h, before[0])
    dh, again = kernels.swiglu_grad(da, h, recompute=True)

    assert dh is h, "the gradient of an operation takes the place of what was saved for it"
    assert a.dtype == dtype
    assert_matches(a, a64)
    assert_matches(dh, h64.grad)
    assert again is not None
    assert torch.equal(again, a)
    assert torch.equal(da, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", [*STRIDES, "expanded"])
@pytest.mark.parametrize(("shape", "erf"), [((1, 1), True), ((7, 3), False), ((5, 34), True)])
def test_geglu(shape, erf, strides, dtype) -> None:
    tokens, width = shape
    h = with_strides(draw(tokens, 2 * width, dtype=dtype), strides)
    da = with_strides(draw(tokens, width, dtype=dtype, seed=1), strides)
    if strides == "expanded":
        da = da[:1, :1].expand(shape)
    h64 = exact(h)
    z, up = h64[:, :width], h64[:, width:]
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    share = torch.erf(z / math.sqrt(2)) if erf else torch.tanh(inner)
    a64 = z * (1 + share) / 2 * up
    a64.backward(da.double())
    before = h.clone(), da.clone()

    a = kernels.Kernels().geglu(h, erf=erf)
    assert torch.equal(h, before[0])
    dh, again = kernels.Kernels().geglu_grad(da, h, recompute=True, erf=erf)

    assert dh is h
    assert a.dtype == dtype
    assert_matches(a, a64)
    assert_matches(dh, h64.grad)
    assert again is not None
    assert torch.equal(again, a)
    assert torch.equal(da, before[1])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("strides", [*STRIDES, "expanded"])
def test_squared_relu(strides, dtype) -> None:
    h = with_strides(draw(7, 5, dtype=dtype), strides)
    da = with_strides(draw(7, 5, dtype=dtype, seed=1), strides)
    if strides == "expanded":
        da = da[:1, :1].expand(7, 5)
    h64 = exact(h)
    a64 = torch.where(h64 > 0, h64 * h64, 0.0)
    a64.backward(da.double())
    a = kernels.Kernels().relu2(h)
    dh, again = kernels.Kernels().relu2_grad(da, h, recompute=True)
    assert dh is h
    assert a.dtype == dtype
    unit = torch.finfo(dtype).eps
    assert h64.grad is not None
    assert ((a.double() - a64).abs() <= unit / 2 * a64).all()
    assert ((dh.double() - h64.grad).abs() <= unit / 2 * h64.grad.abs()).all()
    assert again is not None
    assert torch.equal(again, a)
    odd = torch.tensor([[float("nan"), -float("inf")]], dtype=dtype)
    assert kernels.Kernels().relu2(odd).isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("other", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_of_an_upstream_gradient_of_another_type(dtype, other) -> None:
    h, da = draw(7, 68, dtype=dtype), draw(7, 34, dtype=other, seed=1)
    h64 = exact(h)
    (F.silu(h64[:, :34]) * h64[:, 34:]).backward(da.double())
    dh, _ = kernels.swiglu_grad(da, h)
    assert dh.dtype == dtype
    assert_matches(dh, h64.grad)


def test_swiglu_of_large_gates_stays_finite() -> None:
    h = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 3.0, 4.0]])
    assert kernels.swiglu(h).tolist() == [[0.0, 3e4, 0.0]]
    dh, _ = kernels.swiglu_grad(torch.ones(1, 3), h)
    assert dh.tolist() == [[0.0, 3.0, 2.0, 0.0, 1e4, 0.0]]


def turn(x: torch.Tensor, position: torch.Tensor, theta: float) -> torch.Tensor:
    """x[T, ..., H] with each pair (x[i], x[i + H/2]) turned as a complex number."""
    half = x.shape[-1] // 2
    pair = torch.complex(x[..., :half], x[..., half:])
    rate = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = position[:, None] * rate
    angle = angle.view(len(x), *[1] * (x.dim() - 2), half)
    pair = pair * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pair.real, pair.imag], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize(
    ("shape", "length"),
    [((1, 1, 3, 2), 1), ((11, 3, 5, 10), 11), ((12, 2, 3, 6), 4), ((6, 1, 10, 14), 3)],
)
def test_rotate(shape, length, strides, dtype) -> None:
    tokens, groups, packed, head_dim = shape
    queries = packed - 2
    qkv = with_strides(draw(*shape, dtype=dtype), strides)
    tables = kernels.rope_tables(length, head_dim, 500.0, dtype, torch.device("cpu"))
    qkv64, position = exact(qkv), torch.arange(tokens, dtype=torch.float64) % length
    turned = turn(qkv64[:, :, : queries + 1], position, 500.0)
    want = turned[:, :, :queries], turned[:, :, queries:], qkv64[:, :, queries + 1 :]
    grads = [
        with_strides(draw(tokens, groups, heads, head_dim, dtype=dtype, seed=heads), strides)
        for heads in (queries, 1, 1)
    ]
    grads[2] = grads[2][:1, :1, :, :1].expand(tokens, groups, 1, head_dim)
    torch.autograd.backward(want, [g.double() for g in grads])

    got, copied = kernels.rotate(qkv, *tables), kernels.rotate(qkv, *tables, copy_values=True)
    assert all(map(torch.equal, copied, got))
    assert got[2].untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    assert copied[2].untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr()
    dqkv = torch.full(shape, torch.nan, dtype=dtype)
    dq, dk, dv = grads
    kernels.rotate_grad_(dqkv, dq, dk, dv, *tables)

    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == dtype
        assert_matches(mine, theirs)
    assert torch.equal(got[2], qkv[:, :, queries + 1 :])
    assert_matches(dqkv, qkv64.grad)


def test_rotate_refuses_tokens_that_are_no_whole_sequences() -> None:
    tables = kernels.rope_tables(4, 2, 500.0, torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError):
        kernels.rotate(torch.zeros(6, 1, 3, 2), *tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_tables_keep_their_precision_at_late_positions(dtype) -> None:
    device = torch.device("cpu")
    fine = kernels.rope_tables(70_000, 4, 10_000.0, torch.float64, device)
    coarse = kernels.rope_tables(70_000, 4, 10_000.0, dtype, device)
    position = torch.arange(70_000, dtype=torch.float64)
    assert fine[0].shape == (70_000, 2)
    assert relative_error(fine[1][:, 1], torch.sin(position / 100)) < 1e-10
    for table, want in zip(coarse, fine, strict=True):
        assert table.dtype == torch.float32
        assert torch.equal(table, want.float())
        assert relative_error(table, want) < FLOAT32


def test_the_check_sees_a_second_rounding() -> None:
    x = draw(13, 96, dtype=torch.bfloat16)
    twice = (x * x).to(torch.bfloat16) * x  # rounded after each product
    with pytest.raises(AssertionError):
        assert_matches(twice, x.double() ** 3)
    assert_matches((x.float() ** 3).to(torch.bfloat16), x.double() ** 3)
    assert_matches(F.silu(x.float()), F.silu(x.double()))
