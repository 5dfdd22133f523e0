"""SwiGLU and GeGLU, in place, and rotary embedding in Triton against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.triton.rope import rotate, rotate_grad_, rotate_heads
from megalite.kernels.triton.swiglu import geglu, geglu_grad, swiglu, swiglu_grad
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
@pytest.mark.parametrize(("tokens", "columns"), [(3, 37), (1, 1025), (2, 1)])
def test_swiglu_and_its_gradient_in_place(tokens: int, columns: int, dtype: torch.dtype) -> None:
    whole, h = guarded(rows_of_wider(3 * draw(tokens, 2 * columns, dtype=dtype)))
    h64 = exact(h)
    gate, up = h64.chunk(2, 1)
    want = F.silu(gate) * up
    a = swiglu(h)
    assert_near(a, want)
    da = draw(tokens, columns, dtype=dtype, seed=1)
    want.backward(da.double())
    _, again = swiglu_grad(rows_of_wider(da), h, recompute=True)
    assert_near(h, h64.grad, backward=True)
    assert again is not None
    assert torch.equal(again, a)
    assert_guards_untouched(whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "columns", "erf"), [(3, 37, True), (1, 1025, False)])
def test_geglu_and_its_gradient_in_place(
    tokens: int, columns: int, erf: bool, dtype: torch.dtype
) -> None:
    whole, h = guarded(rows_of_wider(3 * draw(tokens, 2 * columns, dtype=dtype)))
    h64 = exact(h)
    gate, up = h64.chunk(2, 1)
    want = F.gelu(gate, approximate="none" if erf else "tanh") * up
    a = geglu(h, erf=erf)
    assert_near(a, want)
    da = draw(tokens, columns, dtype=dtype, seed=1)
    want.backward(da.double())
    _, again = geglu_grad(rows_of_wider(da), h, recompute=True, erf=erf)
    assert_near(h, h64.grad, backward=True)
    assert again is not None
    assert torch.equal(again, a)
    assert_guards_untouched(whole)
    with pytest.raises(ValueError, match="geglu: h has 3 columns, expected an even number"):
        geglu(draw(2, 3))


def test_swiglu_of_strided_extreme_and_absent_rows() -> None:
    h = draw(3, 2 * 8)
    strided = rows_of_wider(h)
    assert torch.equal(swiglu(strided), swiglu(h))
    far = far_rows(h.bfloat16())
    assert torch.equal(swiglu(far), swiglu(h.bfloat16()))
    extreme = torch.tensor([[-1e4, 1e4, -200.0, 3.0, 3.0, 3.0]])
    assert swiglu(extreme).tolist() == [[0.0, 3e4, 0.0]]
    swiglu_grad(torch.ones(()).expand(1, 3), extreme)
    assert extreme[0, 3:].tolist() == [0.0, 1e4, 0.0]
    assert extreme[0, :3].tolist() == [0.0, 3.0, 0.0]
    assert swiglu(torch.empty(0, 6)).shape == (0, 3)


def test_swiglu_bits_and_errors() -> None:
    h, da = draw(3, 2 * 1030), draw(3, 1030, seed=1)

    def run() -> list[Tensor | None]:
        work = h.clone()
        return [swiglu(h), *swiglu_grad(da, work), work]

    assert_same_bits(run)
    with pytest.raises(ValueError, match="expected an even number"):
        swiglu(draw(2, 3))
    with pytest.raises(ValueError, match=r"da has shape \(2, 3\), expected \(2, 2\)"):
        swiglu_grad(draw(2, 3), draw(2, 4))


def tables(length: int, rotary: int) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(length).double(), 1e4 ** (-torch.arange(rotary // 2) / 7.0))
    return angle.cos(), angle.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    x = x.double()
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copy_values", [False, True])
@pytest.mark.parametrize(
    ("groups", "queries", "head_dim", "rotary"),
    [(2, 3, 16, 16), (1, 1, 80, 80), (5, 7, 64, 24), (3, 33, 128, 128), (2, 2, 16, 0)],
)
def test_rope_turns_queries_and_keys_of_packed_heads_and_back(
    groups: int, queries: int, head_dim: int, rotary: int, copy_values: bool, dtype: torch.dtype
) -> None:
    length, tokens = 4, 8
    packed = rows_of_wider(draw(tokens, groups, queries + 2, head_dim, dtype=dtype))
    cos, sin = tables(length, rotary)
    q, k, v = rotate(packed, cos.float(), sin.float(), copy_values)
    want = turned(packed[:, :, : queries + 1], cos.repeat(2, 1), sin.repeat(2, 1))
    assert_near(q, want[:, :, :queries])
    assert_near(k, want[:, :, queries:])
    assert torch.equal(v, packed[:, :, -1:])
    assert (v.data_ptr() == packed[:, :, -1:].data_ptr()) == (not copy_values)
    turning = torch.cat([q, k], 2)
    assert torch.equal(turning[..., rotary:], packed[:, :, :-1, rotary:])

    # there and back: the gradient of a rotation is its inverse, each way rounds once
    whole, back = guarded(torch.full_like(packed, torch.nan).contiguous())
    rotate_grad_(back, q, k, v, cos.float(), sin.float())
    assert_near(back[:, :, :-1], packed[:, :, :-1].double(), backward=True)
    assert torch.equal(back[:, :, -1], packed[:, :, -1])
    assert_guards_untouched(whole)


def test_rope_copies_values_whatever_they_are_and_takes_gradients_however_they_lie() -> None:
    packed = draw(4, 2, 5, 16)
    packed[0, :, -1, :3] = torch.tensor([torch.inf, -0.0, torch.nan])
    cos, sin = (table.float() for table in tables(4, 16))
    _, _, v = rotate(packed, cos, sin, copy_values=True)
    assert v.contiguous().view(torch.int32).equal(packed[:, :, -1:].contiguous().view(torch.int32))
    dq, dk, dv = draw(4, 2, 3, 16), draw(4, 2, 1, 16), torch.ones(()).expand(4, 2, 1, 16)
    want, got = torch.empty_like(packed), torch.empty_like(packed)
    rotate_grad_(want, dq, dk, dv.contiguous(), cos, sin)
    dq_view, dk_view = (x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in (dq, dk))
    rotate_grad_(got, dq_view, dk_view, dv, cos, sin)
    assert torch.equal(got, want)


def test_rope_takes_positions_and_head_transposed_views() -> None:
    x = draw(6, 6, 8)
    position = torch.tensor([0, 1, 2, 0, 1, 0])
    cos, sin = tables(5, 8)
    want = turned(x[:, None], cos[position], sin[position])[:, 0]
    assert_near(rotate_heads(x, cos.float(), sin.float(), position), want)
    transposed = x.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    assert_near(rotate_heads(transposed, cos.float(), sin.float(), position.int()), want)
    back = rotate_heads(want.float(), cos.float(), sin.float(), position, inverse=True)
    assert_near(back, x.double(), backward=True)


def test_rope_of_rows_beyond_two_to_the_31_elements() -> None:
    near = draw(3, 16, dtype=torch.bfloat16)
    far = far_rows(near)
    tables_32 = [table.float() for table in tables(3, 16)]
    want = rotate_heads(near.view(3, 1, 16), *tables_32)
    got = rotate_heads(far.as_strided((3, 1, 16), (far.stride(0), 16, 1)), *tables_32)
    assert torch.equal(got, want)


def test_rope_bits_and_errors() -> None:
    x = draw(3, 4, 5, 16)
    cos, sin = (table.float() for table in tables(3, 16))
    assert_same_bits(lambda: list(rotate(x, cos, sin, copy_values=True)))
    with pytest.raises(ValueError, match="tables turn 16 elements, a head has 8"):
        rotate(draw(3, 1, 3, 8), cos, sin)
    cos_view, sin_view = cos[:, ::2], sin[:, ::2]
    want = rotate(x, cos_view.contiguous(), sin_view.contiguous())[0]
    assert torch.equal(rotate(x, cos_view, sin_view)[0], want)
    with pytest.raises(TypeError, match=r"position is torch\.float32"):
        rotate_heads(x[:, 0], cos, sin, torch.zeros(3))
    with pytest.raises(ValueError, match=r"rope: types must be the same: dqkv has torch\.float32"):
        rotate_grad_(x, x[:, :, :3], x[:, :, 3:4].double(), x[:, :, 4:], cos, sin)
