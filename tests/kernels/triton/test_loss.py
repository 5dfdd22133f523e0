"""Cross entropy over vocabulary shards in Triton against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.kernels.plain.loss import IGNORE_INDEX
from megalite.kernels.triton import cross_entropy as loss_kernels
from tests.kernels.triton.kit.inputs import (
    DTYPES,
    assert_guards_untouched,
    assert_near,
    assert_same_bits,
    draw,
    exact,
    far_rows,
    guarded,
)


def plain_loss(x: Tensor, label: Tensor, weight: Tensor, z_loss: float, smoothing: float) -> Tensor:
    lse = x.logsumexp(1)
    target = x.gather(1, label.clamp_min(0)[:, None])[:, 0]
    if smoothing:
        target = (1 - smoothing) * target + smoothing * x.mean(1)
    loss = weight * (lse - target + z_loss * lse.square())
    return torch.where(label == IGNORE_INDEX, 0.0, loss)


CASES = [  # tokens, vocabulary, shards, z-loss, smoothing, weights
    (5, 97, 1, 0.0, 0.0, False),
    (4, 5003, 2, 1e-2, 0.0, True),
    (6, 131, 3, 1e-3, 0.1, True),
    (1, 1, 1, 0.0, 0.0, False),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_of_shards_are_those_of_the_whole(
    case: tuple, dtype: torch.dtype
) -> None:
    tokens, vocab, shards, z_loss, smoothing, weighted = case
    width = -(-vocab // shards) + 2  # the last columns of each shard are padding
    logits = 4 * draw(tokens, vocab, dtype=dtype)
    label = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    if tokens > 1:
        label[1] = IGNORE_INDEX
    weight = torch.rand(tokens) if weighted else None
    dloss = torch.rand(tokens) / tokens
    extras = {"smoothing": smoothing, "vocab_size": vocab}

    parts, wholes, owned = [], [], []
    for first in range(0, vocab, width - 2):
        piece = logits[:, first : first + width - 2]
        owned.append((first, piece.shape[1]))
        padding = torch.full((tokens, width - piece.shape[1]), torch.nan, dtype=dtype)
        whole, part = guarded(torch.cat([piece, padding], 1))
        wholes.append(whole)
        parts.append(part)
    stats = torch.stack(
        [
            loss_kernels.cross_entropy_stats(part, label, *span, **extras)
            for part, span in zip(parts, owned, strict=True)
        ]
    )
    loss, lse = loss_kernels.cross_entropy_combine(stats, label, weight_T=weight, z_loss=z_loss)

    x = exact(logits)
    weight64 = torch.ones(tokens).double() if weight is None else weight.double()
    want = plain_loss(x, label, weight64, z_loss, smoothing)
    assert_near(lse, x.logsumexp(1))
    # a loss of one token in a one-token vocabulary is the difference of two equal numbers
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-6, atol=1e-6)
    want.backward(dloss.double())
    for part, span in zip(parts, owned, strict=True):
        loss_kernels.cross_entropy_grad_(
            part, label, lse, dloss, *span, weight_T=weight, z_loss=z_loss, **extras
        )
        assert (part[:, span[1] :] == 0).all()
    got = torch.cat([part[:, : span[1]] for part, span in zip(parts, owned, strict=True)], 1)
    if vocab > 1:
        assert_near(got, x.grad, backward=True)
    for whole in wholes:
        assert_guards_untouched(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits_stay_finite(dtype: torch.dtype) -> None:
    rows = [
        torch.full((40,), -30.0),
        torch.linspace(-1e4, 1e4, 40),
        torch.linspace(1e4, -1e4, 40),
        torch.cat([torch.full((39,), -torch.inf), torch.ones(1)]),
    ]
    logits = torch.stack(rows).to(dtype)
    label = torch.tensor([0, 39, 39, 39])
    x = exact(logits)
    want = plain_loss(x, label, torch.ones(4).double(), 0.0, 0.0)
    stats = loss_kernels.cross_entropy_stats(logits, label, 0, 40)
    loss, lse = loss_kernels.cross_entropy_combine(stats[None], label)
    assert_near(loss, want)
    want.sum().backward()
    expanded = torch.ones(()).expand(4)
    got = loss_kernels.cross_entropy_grad_(logits, label, lse, expanded, 0, 40)
    assert_near(got, x.grad, backward=True)


def test_ignored_rows_may_hold_anything() -> None:
    logits = torch.full((2, 9), torch.nan)
    label = torch.full((2,), IGNORE_INDEX)
    stats = loss_kernels.cross_entropy_stats(logits, label, 0, 9)
    loss, lse = loss_kernels.cross_entropy_combine(stats[None], label)
    got = loss_kernels.cross_entropy_grad_(logits, label, lse, torch.ones(2), 0, 9)
    assert loss.tolist() == [0, 0]
    assert (got == 0).all()


def test_a_shard_of_padding_alone_and_no_tokens() -> None:
    logits, label = torch.full((3, 4), torch.nan), torch.tensor([7, 8, 9])
    stats = loss_kernels.cross_entropy_stats(logits, label, 12, 0)
    assert stats.tolist() == [[-torch.inf, 0, 0]] * 3
    got = loss_kernels.cross_entropy_grad_(logits, label, torch.ones(3), torch.ones(3), 12, 0)
    assert (got == 0).all()
    empty = loss_kernels.cross_entropy_stats(torch.empty(0, 4), label[:0], 0, 4)
    assert empty.shape == (0, 3)


def test_rows_beyond_two_to_the_31_elements() -> None:
    near = draw(3, 50, dtype=torch.bfloat16)
    far, label = far_rows(near), torch.tensor([1, 2, 3])
    stats = loss_kernels.cross_entropy_stats(far, label, 0, 50)
    assert torch.equal(stats, loss_kernels.cross_entropy_stats(near, label, 0, 50))
    lse = stats[:, 0] + stats[:, 1].log()
    arguments = (label, lse, torch.ones(3), 0, 50)
    got = loss_kernels.cross_entropy_grad_(far, *arguments)
    assert torch.equal(got, loss_kernels.cross_entropy_grad_(near, *arguments))


def test_bits_and_errors() -> None:
    logits, label = draw(3, 200), torch.tensor([3, 150, IGNORE_INDEX])

    def run() -> list[Tensor | None]:
        stats = loss_kernels.cross_entropy_stats(logits, label, 0, 190)
        loss, lse = loss_kernels.cross_entropy_combine(stats[None], label)
        work = logits.clone()
        return [loss, loss_kernels.cross_entropy_grad_(work, label, lse, loss, 0, 190)]

    assert_same_bits(run)
    with pytest.raises(ValueError, match="num_columns=201, expected 0 to 200"):
        loss_kernels.cross_entropy_stats(logits, label, 0, 201)
    with pytest.raises(TypeError, match=r"label is torch\.int32"):
        loss_kernels.cross_entropy_stats(logits, label.int(), 0, 200)
    with pytest.raises(ValueError, match="smoothing needs vocab_size"):
        loss_kernels.cross_entropy_stats(logits, label, 0, 200, smoothing=0.1)
