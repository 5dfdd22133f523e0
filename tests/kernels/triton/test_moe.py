"""Experts in Triton: sorting, permute, unpermute and grouped products against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels.plain import moe as moe
from megalite.kernels.triton import grouped_gemm as gemm
from megalite.kernels.triton import moe_permute as rows_of
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


def experts_of(tokens: int, copies: int, experts: int) -> Tensor:
    """Indices of which some are dropped, and of which the last expert gets none."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(-1, max(1, experts - 1), (tokens, copies), generator=generator)


def assert_same_map(got: moe.RowMap, want: moe.RowMap) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("tokens", "copies", "experts"), [(1, 1, 1), (3, 8, 2), (401, 3, 5), (19, 2, 200), (0, 2, 3)]
)
def test_the_sort_is_that_of_torch(tokens: int, copies: int, experts: int) -> None:
    expert = experts_of(tokens, copies, experts)
    want = moe.expert_rows(expert, experts)
    assert_same_map(rows_of.expert_rows(expert, experts), want)
    strided = expert.int().t().contiguous().t()
    assert_same_map(rows_of.expert_rows(strided, experts), want)


def test_the_sort_over_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks stand for many copies: counts are summed over several blocks of chunks."""
    for name, value in (("_CHUNK", 32), ("_BLOCK", 16), ("_TABLE", 64)):
        monkeypatch.setattr(rows_of, name, value)
    expert = experts_of(167, 2, 7)
    assert_same_map(rows_of.expert_rows(expert, 7), moe.expert_rows(expert, 7))
    nobody = torch.full((50, 2), -1)
    assert_same_map(rows_of.expert_rows(nobody, 3), moe.expert_rows(nobody, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("copies", "columns"), [(1, 1030), (3, 37), (8, 16)])
def test_permute_and_unpermute_with_gradients(
    copies: int, columns: int, dtype: torch.dtype
) -> None:
    tokens, experts = 6, 4
    rows = moe.expert_rows(experts_of(tokens, copies, experts), experts)
    x = rows_of_wider(draw(tokens, columns, dtype=dtype))
    permuted = rows_of.permute(x, rows)
    assert torch.equal(permuted, moe.permute(x, rows))

    end = int(rows.offset_E1[-1])
    y = rows_of_wider(draw(tokens * copies, columns, dtype=dtype, seed=1))
    y[end:] = torch.nan  # dropped rows are never read
    weight = draw(tokens, copies, seed=2).where(rows.row_TK >= 0, torch.nan)
    y64, weight64 = exact(y), exact(weight)
    out64 = moe.unpermute(y64, rows, weight64)
    assert_near(rows_of.unpermute(y, rows, weight), out64)
    assert_near(rows_of.unpermute(y, rows), moe.unpermute(exact(y), rows))

    dout = rows_of_wider(draw(tokens, columns, dtype=dtype, seed=3))
    out64.backward(dout.double())
    dy, dweight = rows_of.unpermute_grad(dout, y, rows, weight)
    assert_near(dy, y64.grad, backward=True)
    assert_near(dweight, weight64.grad, backward=True)
    low = rows_of.unpermute_grad(dout, y, rows, weight.to(dtype))[1]
    assert low.dtype == dtype


def test_rows_of_no_tokens_expanded_and_far_apart() -> None:
    rows = moe.expert_rows(experts_of(4, 2, 3), 3)
    none = moe.expert_rows(experts_of(0, 2, 3), 3)
    assert rows_of.permute(torch.empty(0, 5), none).shape == (0, 5)
    assert rows_of.unpermute(torch.empty(0, 5), none).shape == (0, 5)
    ones = torch.ones(()).expand(8, 5)
    assert torch.equal(rows_of.unpermute(ones, rows), moe.unpermute(ones, rows))
    x, y = draw(4, 16, dtype=torch.bfloat16), draw(8, 16, dtype=torch.bfloat16, seed=1)
    assert torch.equal(rows_of.permute(far_rows(x), rows), rows_of.permute(x, rows))
    weight = draw(4, 2)
    assert torch.equal(
        rows_of.unpermute(far_rows(y), rows, weight), rows_of.unpermute(y, rows, weight)
    )
    far = rows_of.unpermute_grad(far_rows(x), far_rows(y), rows, weight)
    for a, b in zip(far, rows_of.unpermute_grad(x, y, rows, weight), strict=True):
        assert torch.equal(a, b)


def test_bits_of_rows() -> None:
    expert, x, weight = experts_of(9, 2, 5), draw(9, 33), draw(9, 2, seed=1)

    def run() -> list[Tensor | None]:
        rows = rows_of.expert_rows(expert, 5)
        y = rows_of.permute(x, rows)
        gradients = rows_of.unpermute_grad(x, y, rows, weight)
        return [*rows, y, rows_of.unpermute(y, rows, weight), *gradients]

    assert_same_bits(run)


# rows of each expert, rows left over, F, D, through descriptors
GROUPS = [
    ([0, 131, 1, 0, 66], 4, 33, 45, False),
    ([0, 131, 1, 0, 66], 3, 64, 72, True),
    ([2], 0, 1, 1, False),
    ([5, 0], 140, 320, 24, True),
]


def offsets(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", GROUPS)
def test_grouped_products(case: tuple, dtype: torch.dtype) -> None:
    sizes, left, out_columns, in_columns, tma = case
    offset, end = offsets(sizes), sum(sizes)
    x = draw(end + left, in_columns, dtype=dtype)
    dy = draw(end + left, out_columns, dtype=dtype, seed=1)
    if not tma:
        x, dy = rows_of_wider(x), rows_of_wider(dy)
    weight = draw(len(sizes), out_columns, in_columns, dtype=dtype, seed=2)
    x[end:], dy[end:] = torch.nan, torch.nan  # rows of nobody reach nothing
    if 0 in sizes:
        weight[sizes.index(0)] = torch.nan  # nor do weights without rows
    x64, weight64 = exact(x), exact(weight)
    y64 = moe.grouped_linear(x64, weight64, offset)
    y = gemm.grouped_linear(x, weight, offset, tma=tma)
    assert_near(y, y64)
    assert (y[end:] == 0).all()
    y64[:end].backward(dy[:end].double())
    dx = gemm.grouped_linear_input_grad(dy, weight, offset, tma=tma)
    assert_near(dx, x64.grad, backward=True)
    assert (dx[end:] == 0).all()

    start = draw(*weight.shape, seed=3)
    whole, buffer = guarded(start)
    gemm.grouped_weight_grad_(buffer, dy, x, offset, tma=tma)
    assert weight64.grad is not None
    assert_near(buffer, start.double() + weight64.grad, backward=True)
    assert_guards_untouched(whole)
    rounded = torch.empty_like(weight)
    gemm.grouped_weight_grad_(rounded, dy, x, offset, accumulate=False, tma=tma)
    assert_near(rounded, weight64.grad, backward=True)


def test_descriptors_are_used_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    source = gemm._source

    def recorded(*arguments: Any) -> Any:
        made.append(arguments[-1])
        return source(*arguments)

    monkeypatch.setattr(gemm, "_source", recorded)
    offset, bf16 = offsets([3]), torch.bfloat16
    weight = draw(1, 40, 16, dtype=bf16)
    x, dy = draw(3, 16, dtype=bf16), draw(3, 40, dtype=bf16)
    gemm.grouped_linear(x, weight, offset)
    gemm.grouped_linear(rows_of_wider(x), weight, offset)
    # 40 rows of weights are no whole blocks: the next expert's would be read
    gemm.grouped_linear_input_grad(dy, weight, offset)
    gemm.grouped_weight_grad_(torch.zeros(1, 40, 16), dy, x, offset)
    assert made == [True, True, False, False, False, False, True, True]


def test_products_of_rows_beyond_two_to_the_31_elements() -> None:
    near, dy = draw(3, 16, dtype=torch.bfloat16), draw(3, 8, dtype=torch.bfloat16)
    far, far_dy, offset = far_rows(near), far_rows(dy), offsets([1, 2])
    weight = draw(2, 8, 16, dtype=torch.bfloat16)
    for a, b in ((far, near), (far_dy, dy)):
        product = gemm.grouped_linear if a is far else gemm.grouped_linear_input_grad
        assert torch.equal(
            product(a, weight, offset, tma=False), product(b, weight, offset, tma=False)
        )
    buffers = [torch.zeros(2, 8, 16) for _ in range(2)]
    gemm.grouped_weight_grad_(buffers[0], far_dy, far, offset, tma=False)
    gemm.grouped_weight_grad_(buffers[1], dy, near, offset, tma=False)
    assert torch.equal(*buffers)


def test_no_rows_and_no_experts_with_rows() -> None:
    weight, offset = draw(2, 8, 4), offsets([0, 0])
    assert gemm.grouped_linear(torch.empty(0, 4), weight, offset).shape == (0, 8)
    assert (gemm.grouped_linear(draw(3, 4), weight, offset) == 0).all()
    buffer = torch.full((2, 8, 4), torch.nan)
    gemm.grouped_weight_grad_(buffer, draw(3, 8), draw(3, 4), offset, accumulate=False)
    assert (buffer == 0).all()


def test_tiles_cover_every_row_once() -> None:
    sizes, num_rows = [0, 64, 65, 1, 0, 63], 300
    tile = gemm.row_tiles(offsets(sizes), num_rows, 64)
    assert len(tile) == 5 + len(sizes)
    want = [[1, 0, 64], [2, 64, 129], [2, 128, 129], [3, 129, 130], [5, 130, 193]]
    want += [[6, 193, 300], [6, 257, 300]]
    assert tile[: len(want)].tolist() == want
    assert (tile[len(want) :, 0] == -1).all()
    full = gemm.row_tiles(offsets([1] * 6), 6 * 64, 64)  # the upper bound is reached
    assert (full[:, 0] >= 0).all()


def test_bits_of_products() -> None:
    offset = offsets([70, 0, 9])
    x, dy, weight = draw(80, 40), draw(80, 24, seed=1), draw(3, 24, 40, seed=2)

    def run() -> list[Tensor | None]:
        buffer = weight.clone()
        gemm.grouped_weight_grad_(buffer, dy, x, offset)
        y = gemm.grouped_linear(x, weight, offset)
        return [y, gemm.grouped_linear_input_grad(dy, weight, offset), buffer]

    assert_same_bits(run)


def test_errors_name_the_tensor_and_the_way_out() -> None:
    rows = moe.expert_rows(experts_of(4, 2, 3), 3)
    with pytest.raises(ValueError, match="num_experts=2000, expected 1 to 1024"):
        rows_of.expert_rows(experts_of(4, 2, 3), 2000)
    with pytest.raises(TypeError, match=r"permute: x is torch\.float64.*backend=reference"):
        rows_of.permute(draw(4, 6).double(), rows)
    with pytest.raises(ValueError, match=r"last dimension of x has stride 4.*contiguous"):
        rows_of.permute(draw(6, 4).t(), rows)
    with pytest.raises(ValueError, match="65 experts a token; the triton kernel takes 1 to 64"):
        rows_of.permute(draw(1, 6), moe.expert_rows(experts_of(1, 65, 3), 3))
    with pytest.raises(ValueError, match=r"types must be the same: y has torch\.float32, dout has"):
        rows_of.unpermute_grad(draw(4, 6).bfloat16(), draw(8, 6), rows, draw(4, 2))
    x, weight, offset = draw(8, 6), draw(3, 5, 6), rows.offset_E1
    with pytest.raises(ValueError, match="types must be the same"):
        gemm.grouped_linear(x.bfloat16(), weight, offset)
    with pytest.raises(ValueError, match="weights of experts lie 12 elements apart, expected 24"):
        gemm.grouped_linear(
            x, draw(4, 2, 6).repeat(1, 2, 1).as_strided((3, 4, 6), (12, 6, 1)), offset
        )
    with pytest.raises(ValueError, match=r"5 rows are no whole blocks of 16.*pass tma=None"):
        gemm.grouped_linear_input_grad(draw(8, 5), weight, offset, tma=True)
    with pytest.raises(ValueError, match="1025 experts, expected 1 to 1024"):
        gemm.row_tiles(torch.zeros(1026, dtype=torch.int32), 8, 64)
    with pytest.raises(TypeError, match=r"buffer is torch\.float64"):
        gemm.grouped_weight_grad_(weight.double(), draw(8, 5), x, offset)
