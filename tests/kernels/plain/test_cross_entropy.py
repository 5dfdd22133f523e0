"""The loss over vocabulary shards: stats of each, their merge, and the gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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


def sharded_loss(
    shards: list[Tensor], label_T: Tensor, dloss_T: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """Per-token loss and the gradient of all columns, as tp = len(shards) ranks make them."""
    width = shards[0].shape[1]
    places = [(r * width, min(width, max(0, vocab - r * width))) for r in range(len(shards))]
    stats = [
        kernels.cross_entropy_stats(x, label_T, *place)
        for x, place in zip(shards, places, strict=True)
    ]
    loss_T, lse_T = kernels.cross_entropy_combine(torch.stack(stats))
    grads = [
        kernels.cross_entropy_grad_(x, label_T, lse_T, dloss_T, *place)
        for x, place in zip(shards, places, strict=True)
    ]
    for x, grad in zip(shards, grads, strict=True):
        assert grad.data_ptr() == x.data_ptr()  # overwritten, not copied
    return loss_T, torch.cat(grads, dim=1)


def check(logits_TV: Tensor, label_T: Tensor, vocab: int, num_shards: int, strides: str) -> None:
    """Padding is NaN on the way in, so that whoever reads it is found out."""
    dtype, tokens = logits_TV.dtype, len(logits_TV)
    padded = torch.full((tokens, -(-vocab // 4) * 4), torch.nan, dtype=dtype)
    padded[:, :vocab] = logits_TV
    shards = [with_strides(x, strides).clone() for x in padded.chunk(num_shards, dim=1)]
    if strides != "rows":
        shards = [with_strides(x, strides) for x in padded.clone().chunk(num_shards, dim=1)]
    loss_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    dloss = draw(tokens, seed=9, dtype=loss_dtype)  # another weight for each token
    dloss[tokens // 2] = 0.0
    logits64 = exact(logits_TV)
    loss64 = F.cross_entropy(logits64, label_T, reduction="none")
    loss64.backward(dloss.double())

    loss, grad = sharded_loss(shards, label_T, dloss, vocab)

    assert loss.dtype == loss_dtype
    assert grad.dtype == dtype
    assert_matches(loss, loss64)
    assert_matches(grad[:, :vocab], logits64.grad)
    assert not grad[:, vocab:].any()  # and no NaN: those are truthy


def labels(tokens: int, vocab: int) -> Tensor:
    """The edges of every shard first, then any."""
    label = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(3))
    width = -(-vocab // 4)
    edges = sorted({e for r in range(5) for e in (r * width - 1, r * width) if 0 <= e < vocab})
    label[: len(edges)] = torch.tensor(edges)[:tokens]
    return label


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("vocab", [1, 5, 97, 131])  # with 4 shards of 5: the last is padding only
def test_loss_and_gradient(vocab, num_shards, dtype) -> None:
    check(draw(17, vocab, dtype=dtype), labels(17, vocab), vocab, num_shards, "rows")


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_of_any_strides(dtype, strides) -> None:
    check(draw(17, 97, dtype=dtype), labels(17, 97), 97, 2, strides)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_shards", [1, 4])
def test_large_vocabulary_takes_several_row_blocks(num_shards, dtype) -> None:
    check(draw(13, 50_257, dtype=dtype), labels(13, 50_257), 50_257, num_shards, "rows")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("vocab", [5, 97])
@pytest.mark.parametrize("kind", ["all -30", "spread", "one huge", "one shard far below"])
def test_extreme_logits(kind, vocab, num_shards, dtype) -> None:
    logits = draw(17, vocab, dtype=dtype)
    if kind == "all -30":
        logits = torch.full_like(logits, -30.0)
    elif kind == "spread":
        logits *= 1e4
    elif kind == "one huge":
        logits[:, 1] = 1e4
    else:
        logits[:, : vocab // 2] -= 3e4
    check(logits, labels(17, vocab), vocab, num_shards, "rows")


def test_shard_of_padding_alone() -> None:
    stats = kernels.cross_entropy_stats(torch.full((3, 2), torch.nan), torch.zeros(3).long(), 6, 0)
    assert stats.tolist() == [[-torch.inf, 0.0, 0.0]] * 3


def test_sixteen_bit_logits_give_a_float32_loss() -> None:
    logits = draw(64, 97, dtype=torch.bfloat16)
    label = labels(64, 97)
    loss, _ = sharded_loss([logits.clone()], label, torch.ones(64), 97)
    want = F.cross_entropy(logits.double(), label, reduction="none")
    assert relative_error(loss, want) <= FLOAT32
    assert relative_error(want.to(torch.bfloat16), want) > 100 * FLOAT32


def test_expanded_upstream_gradient() -> None:
    logits, label = draw(7, 9), labels(7, 9)
    want = torch.autograd.grad(F.cross_entropy(x := exact(logits), label, reduction="sum"), x)
    ones = torch.ones((), dtype=torch.float64).expand(7)
    assert_matches(sharded_loss([logits], label, ones, 9)[1], want[0])
