"""SwiGLU and rotary embedding in Triton, in place, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.triton.rope import rotate_heads_
from megalite.kernels.triton.swiglu import swiglu, swiglu_grad
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
@pytest.mark.parametrize(
    ("groups", "queries", "head_dim", "rotary"), [(2, 3, 16, 16), (1, 1, 80, 80), (5, 7, 64, 24)]
)
def test_rope_turns_queries_and_keys_of_packed_heads(
    groups: int, queries: int, head_dim: int, rotary: int, dtype: torch.dtype
) -> None:
    length, tokens = 4, 8
    whole, packed = guarded(draw(tokens, groups, queries + 2, head_dim, dtype=dtype))
    before = packed.clone()
    cos, sin = tables(length, rotary)
    turning = packed[:, :, : queries + 1]
    rotate_heads_(turning, cos.float(), sin.float())
    want = turned(before[:, :, : queries + 1], cos.repeat(2, 1), sin.repeat(2, 1))
    assert_near(turning, want)
    assert torch.equal(packed[:, :, -1], before[:, :, -1])
    assert torch.equal(turning[..., rotary:], before[:, :, :-1, rotary:])
    assert_guards_untouched(whole)
    rotate_heads_(turning, cos.float(), sin.float(), inverse=True)
    # there and back: the gradient of a rotation is its inverse, each way rounds once
    assert_near(turning, before[:, :, :-1].double(), backward=True)


def test_rope_takes_positions_and_head_transposed_views() -> None:
    x = draw(6, 3, 2, 8)
    position = torch.tensor([0, 1, 2, 0, 1, 0])
    cos, sin = tables(5, 8)
    want = turned(x, cos[position], sin[position])
    assert_near(rotate_heads_(x.clone(), cos.float(), sin.float(), position), want)
    transposed = x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    assert_near(rotate_heads_(transposed, cos.float(), sin.float(), position.int()), want)


def test_rope_of_rows_beyond_two_to_the_31_elements() -> None:
    near = draw(3, 16, dtype=torch.bfloat16)
    far = far_rows(near)
    tables_32 = [table.float() for table in tables(3, 16)]
    want = rotate_heads_(near.view(3, 1, 1, 16), *tables_32)
    rotate_heads_(far.as_strided((3, 1, 1, 16), (far.stride(0), 16, 16, 1)), *tables_32)
    assert torch.equal(far, want.view(3, 16))


def test_rope_bits_and_errors() -> None:
    x = draw(3, 4, 5, 16)
    cos, sin = (table.float() for table in tables(3, 16))
    assert_same_bits(lambda: [rotate_heads_(x.clone(), cos, sin)])
    with pytest.raises(ValueError, match="tables turn 16 elements, a head has 8"):
        rotate_heads_(draw(3, 1, 1, 8), cos, sin)
    half = (table[:, ::2] for table in (cos, sin))
    copies = (table[:, ::2].contiguous() for table in (cos, sin))
    assert torch.equal(rotate_heads_(x.clone(), *half), rotate_heads_(x.clone(), *copies))
    with pytest.raises(TypeError, match=r"position is torch\.float32"):
        rotate_heads_(x, cos, sin, torch.zeros(3))
