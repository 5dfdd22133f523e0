"""Experts in plain torch: the sort by its definition, gradients by autograd in float64, errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.kernels.plain import moe as moe
from tests.kernels.kit import assert_matches, draw


def experts_of(tokens: int, copies: int, experts: int, seed: int = 0) -> Tensor:
    """Indices of which some are dropped, and of which the last expert gets none."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, max(1, experts - 1), (tokens, copies), generator=generator)


@pytest.mark.parametrize(
    ("tokens", "copies", "experts"), [(7, 1, 3), (50, 2, 4), (33, 8, 16), (3, 3, 1), (0, 2, 3)]
)
def test_rows_are_a_stable_sort_by_expert(tokens: int, copies: int, experts: int) -> None:
    expert = experts_of(tokens, copies, experts)
    row, offset = moe.expert_rows(expert, experts)
    key = [e if 0 <= e < experts else experts for e in expert.flatten().tolist()]
    order = sorted(range(len(key)), key=lambda copy: key[copy])
    want = torch.empty(len(key), dtype=torch.int32)
    for at, copy in enumerate(order):
        want[copy] = at if key[copy] < experts else -1 - at
    assert torch.equal(row.flatten(), want)
    starts = [sum(k < e for k in key) for e in range(experts + 1)]
    assert offset.tolist() == starts
    assert torch.equal(moe.expert_rows(expert.int(), experts).row_TK, row)


def test_indices_of_other_experts_are_dropped() -> None:
    """A shard of experts passes indices less its first one: all others are out of range."""
    expert = torch.tensor([[5, 2], [3, 7], [4, 0]])
    row, offset = moe.expert_rows(expert - 3, 2)
    assert offset.tolist() == [0, 1, 2]
    assert row.tolist() == [[-3, -4], [0, -5], [1, -6]]


def test_there_and_back() -> None:
    expert = torch.tensor([[0, 1], [1, -1], [-1, -1], [2, 0]])
    rows = moe.expert_rows(expert, 4)
    x = torch.arange(1.0, 5).unsqueeze(1) * torch.ones(3)
    y = moe.permute(x, rows)
    assert y[:, 0].tolist() == [1, 4, 1, 2, 4, 0, 0, 0]
    y[5:] = torch.nan  # dropped rows are never read
    assert moe.unpermute(y, rows)[:, 0].tolist() == [2, 2, 0, 8]
    weight = torch.tensor([[0.5, 0.25], [1.0, torch.nan], [torch.nan] * 2, [2.0, 1.0]])
    assert moe.unpermute(y, rows, weight)[:, 0].tolist() == [0.75, 2, 0, 12]


@pytest.mark.parametrize("copies", [1, 3])
def test_gradients_of_rows(copies: int) -> None:
    tokens, columns = 5, 4
    rows = moe.expert_rows(experts_of(tokens, copies, 4), 4)
    x = draw(tokens, columns).requires_grad_()
    y = draw(tokens * copies, columns, seed=1).requires_grad_()
    weight = draw(tokens, copies, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: moe.permute(x, rows), x)
    assert torch.autograd.gradcheck(lambda y, w: moe.unpermute(y, rows, w), (y, weight))
    dy, dout = draw(tokens * copies, columns, seed=3), draw(tokens, columns, seed=4)
    moe.permute(x, rows).backward(dy)
    assert_matches(moe.unpermute(dy, rows), x.grad)
    moe.unpermute(y, rows, weight).backward(dout)
    got_y, got_weight = moe.unpermute_grad(dout, y.detach(), rows, weight.detach())
    assert_matches(got_y, y.grad)
    assert_matches(got_weight, weight.grad)


def test_products_and_their_gradients() -> None:
    offset = torch.tensor([0, 3, 3, 8], dtype=torch.int32)  # one expert without rows, two rows left
    x = draw(10, 5).requires_grad_()
    weight = draw(3, 4, 5, seed=1).requires_grad_()
    y = moe.grouped_linear(x, weight, offset)
    expert = torch.tensor([0] * 3 + [2] * 5)
    want = torch.einsum("rd,rfd->rf", x[:8], weight[expert])
    assert_matches(y[:8].detach(), want)
    assert (y[8:] == 0).all()
    assert torch.autograd.gradcheck(
        lambda x, weight: moe.grouped_linear(x, weight, offset), (x, weight)
    )
    dy = draw(10, 4, seed=2)
    y.backward(dy)
    assert_matches(moe.grouped_linear_input_grad(dy, weight.detach(), offset), x.grad)
    buffer = draw(3, 4, 5, seed=3)
    assert weight.grad is not None
    total = buffer + weight.grad
    moe.grouped_weight_grad_(buffer, dy, x.detach(), offset)
    assert_matches(buffer, total)
    buffer.fill_(torch.nan)
    moe.grouped_weight_grad_(buffer, dy, x.detach(), offset, accumulate=False)
    assert_matches(buffer, weight.grad)


def test_bfloat16_is_summed_in_float32_and_rounded_once() -> None:
    rows = moe.expert_rows(experts_of(20, 3, 5), 5)
    y, dout = (draw(n, 16, seed=n, dtype=torch.bfloat16) for n in (60, 20))
    weight = draw(20, 3, dtype=torch.float32)
    got = moe.unpermute(y, rows, weight)
    assert got.dtype == torch.bfloat16
    assert_matches(got, moe.unpermute(y.double(), rows, weight.double()))
    dy, dweight = moe.unpermute_grad(dout, y, rows, weight)
    wants = moe.unpermute_grad(dout.double(), y.double(), rows, weight.double())
    for part, want in zip((dy, dweight), wants, strict=True):
        assert_matches(part, want)
    matrices = draw(5, 8, 16, dtype=torch.bfloat16)
    got = moe.grouped_linear(y, matrices, rows.offset_E1)
    assert_matches(got, moe.grouped_linear(y.double(), matrices.double(), rows.offset_E1))


def test_errors_say_what_is_expected() -> None:
    expert = experts_of(4, 2, 3)
    rows, x = moe.expert_rows(expert, 3), draw(4, 6)
    offset, weight = rows.offset_E1, draw(3, 5, 6)
    with pytest.raises(TypeError, match=r"expert is torch\.float32, expected int32 or int64"):
        moe.expert_rows(expert.float(), 3)
    with pytest.raises(ValueError, match=r"shape \(4,\).*pass expert\.unsqueeze\(1\)"):
        moe.expert_rows(expert[:, 0], 3)
    with pytest.raises(ValueError, match="num_experts=0, expected 1 to"):
        moe.expert_rows(expert, 0)
    with pytest.raises(ValueError, match="copies of tokens, at most"):
        moe.expert_rows(expert[:1, :1].expand(1 << 30, 2), 3)
    with pytest.raises(TypeError, match=r"row is torch\.int64.*pass what expert_rows gives"):
        moe.permute(x, moe.RowMap(rows.row_TK.long(), offset))
    with pytest.raises(ValueError, match=r"x has shape \(3, 6\), expected \(4, 6\)"):
        moe.permute(x[:3], rows)
    with pytest.raises(ValueError, match=r"y has shape \(4, 6\), expected \(8, 6\)"):
        moe.unpermute(x, rows)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\), expected \(4, 2\)"):
        moe.unpermute(draw(8, 6), rows, x[:, 0])
    with pytest.raises(TypeError, match=r"weight is torch\.int64, expected floating point"):
        moe.unpermute(draw(8, 6), rows, expert)
    with pytest.raises(ValueError, match=r"x has shape \(8, 5\), expected \(8, 6\)"):
        moe.grouped_linear(draw(8, 5), weight, offset)
    with pytest.raises(ValueError, match=r"offset has shape \(3,\), expected \(4,\)"):
        moe.grouped_linear(draw(8, 6), weight, offset[:3])
    with pytest.raises(TypeError, match=r"offset is torch\.int64, expected int32"):
        moe.grouped_linear(draw(8, 6), weight, offset.long())
    with pytest.raises(ValueError, match=r"expected \[experts, out, in\]"):
        moe.grouped_linear_input_grad(draw(8, 5), weight[0], offset)
