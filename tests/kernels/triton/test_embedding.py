"""The gradient of an embedding in Triton against float64."""

from __future__ import annotations

import pytest
import torch

from megalite.kernels.triton.embedding import embedding_grad_
from tests.kernels.triton.kit.inputs import (
    DTYPES,
    assert_guards_untouched,
    assert_near,
    assert_same_bits,
    draw,
    far_rows,
    guarded,
    rows_of_wider,
)


def tokens(count: int, vocabulary: int) -> torch.Tensor:
    """Rows in no order, of which one is most, and some are other ranks'."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(-2, vocabulary + 2, (count,), generator=generator)
    rows[::3] = 2
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "vocabulary", "columns"), [(1, 3, 7), (12, 5, 33), (150, 4, 300), (33, 70, 16)]
)
def test_rows_are_added_to_the_buffer(
    count: int, vocabulary: int, columns: int, dtype: torch.dtype
) -> None:
    row = tokens(count, vocabulary)
    dy = rows_of_wider(draw(count, columns, dtype=dtype))
    whole, buffer = guarded(draw(vocabulary, columns, seed=1))
    owned = (row >= 0) & (row < vocabulary)
    want = buffer.double().index_add(0, row[owned], dy[owned].double())
    untouched = torch.ones(vocabulary, dtype=torch.bool)
    untouched[row[owned]] = False
    before = buffer.clone()
    embedding_grad_(buffer, dy, row)
    assert_near(buffer, want, backward=True)
    assert torch.equal(buffer[untouched], before[untouched])
    assert_guards_untouched(whole)


def test_bits_do_not_depend_on_the_run_nor_on_tokens_of_other_rows() -> None:
    row, dy = tokens(90, 4), draw(90, 40)

    def run() -> list[torch.Tensor]:
        buffer = draw(4, 40, seed=1)
        embedding_grad_(buffer, dy, row)
        return [buffer]

    assert_same_bits(run)
    alone = draw(4, 40, seed=1)
    embedding_grad_(alone, dy[row == 2], row[row == 2])
    assert torch.equal(alone[2], run()[0][2])


def test_other_ranks_tokens_may_be_anything_and_none_may_be_there() -> None:
    buffer, dy = draw(3, 8), draw(5, 8, seed=1)
    before = buffer.clone()
    dy[:4] = torch.nan
    embedding_grad_(buffer, dy, torch.tensor([-1, 3, 1 << 40, -(1 << 40), 1]))
    assert torch.equal(buffer[1], before[1] + dy[4])
    assert torch.equal(buffer[::2], before[::2])
    embedding_grad_(buffer, dy[:0], torch.zeros(0, dtype=torch.int64))
    embedding_grad_(buffer, torch.ones(()).expand(5, 8), torch.zeros(5, dtype=torch.int64))
    assert torch.equal(buffer[0], before[0] + 5)


def test_rows_beyond_two_to_the_31_elements() -> None:
    near = draw(3, 16, dtype=torch.bfloat16)
    want, got = torch.zeros(2, 16), torch.zeros(2, 16)
    row = torch.tensor([1, 0, 1])
    embedding_grad_(want, near, row)
    embedding_grad_(got, far_rows(near), row)
    assert torch.equal(got, want)


def test_errors_name_the_tensor() -> None:
    buffer, dy, row = draw(3, 8), draw(5, 8), torch.zeros(5, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"buffer is torch\.bfloat16, row torch\.int64"):
        embedding_grad_(buffer.bfloat16(), dy, row)
    with pytest.raises(TypeError, match=r"row torch\.int32"):
        embedding_grad_(buffer, dy, row.int())
    with pytest.raises(ValueError, match=r"row has shape \(4,\), expected \(5,\)"):
        embedding_grad_(buffer, dy, row[:4])
    with pytest.raises(ValueError, match=r"buffer has shape \(3, 7\), expected \(3, 8\)"):
        embedding_grad_(buffer[:, :7], dy, row)
    with pytest.raises(ValueError, match="expected contiguous rows"):
        embedding_grad_(draw(8, 3).t(), dy, row)
