"""Both losses against plain cross entropy: each token with its own upstream gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.cross_entropy import (
    VocabShard,
    chunked_linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megalite.tensor_parallel.linear import ColumnParallelLinear
from tests.pool import traffic
from tests.tensor_parallel.kit.pieces import (
    LAYOUTS,
    Outcome,
    draw,
    fill,
    gradients_of,
    present,
    relative_error,
    same_everywhere,
    tensor_parallel,
    tokens_of,
    transposed,
    whole_gradient,
    whole_tokens,
)
from tests.tolerances import PLAIN_FLOAT64

TOKENS, WIDTH, PADDED = 12, 6, 104
CHUNKS = [0, 1, 5, 12, 100]  # 0: not chunked
UPSTREAM = ["random", "masked", "one token", "expanded"]


def labels(vocab: int) -> Tensor:
    edges = [0, 25, 26, 51, 52, 77, 78, vocab - 1]  # of the shards of 104 / 4
    label = torch.arange(TOKENS) * 7 % vocab
    label[: len(edges)] = torch.tensor(edges) % vocab
    return label


def upstream(kind: str) -> Tensor:
    """Gradient of each token's loss; masked ones have none."""
    if kind == "expanded":
        return torch.ones((), dtype=torch.float64).expand(TOKENS)
    weight = draw("upstream", TOKENS)
    if kind == "masked":
        weight[::2] = 0.0
        weight[:3] = 0.0
    if kind == "one token":
        weight[:-1] = 0.0  # a loss that takes the first token's gradient for all gives nothing
    return weight


def head_loss(ctx, sp, vocab, chunk, kind, options) -> Outcome:
    """Loss of logits x @ W^T; `options` may freeze the weight or make x non-contiguous."""
    context = tensor_parallel(ctx, sp)
    spec = ShardSpec("head.weight", (PADDED, WIDTH), 0)
    layer = ColumnParallelLinear(context, spec)
    fill(layer)
    layer.weight.requires_grad_("frozen" not in options)
    heard: list[torch.nn.Parameter] = []
    context.grads.listener = heard.append
    x = tokens_of(draw("x", TOKENS, WIDTH), context)
    x = (transposed(x) if "transposed" in options else x).requires_grad_()
    shard = VocabShard(context, vocab, PADDED)
    if chunk:
        loss = chunked_linear_cross_entropy(x, layer.weight, labels(vocab), shard, chunk)
    else:
        loss = vocab_parallel_cross_entropy(layer(x), labels(vocab), shard)
    loss.backward(upstream(kind))
    notes: dict[str, Any] = {"heard": len(heard)}
    notes["ledger"] = traffic(context.tp.ledger)
    return Outcome(loss.detach(), x.grad, gradients_of(layer), notes)


def serial(vocab: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of x and the weight, padding rows cut off before the softmax."""
    x = draw("x", TOKENS, WIDTH).requires_grad_()
    weight = draw("head.weight", PADDED, WIDTH).requires_grad_()
    loss = F.cross_entropy(x @ weight[:vocab].t(), labels(vocab), reduction="none")
    loss.backward(upstream(kind))
    return loss.detach(), present(x.grad), present(weight.grad)


def check(pool, tp, sp, vocab, chunk, kind, options=()) -> list[Outcome]:
    outcomes = pool.run(head_loss, tp, sp, vocab, chunk, kind, options)
    loss, dx, dweight = serial(vocab, kind)
    got = same_everywhere([o.output for o in outcomes])
    assert relative_error(got, loss) <= PLAIN_FLOAT64
    assert relative_error(whole_tokens([o.input_grad for o in outcomes], sp), dx) <= PLAIN_FLOAT64
    if "frozen" not in options:
        grad = whole_gradient(outcomes, "weight")
        assert relative_error(grad, dweight) <= PLAIN_FLOAT64
        assert not grad[vocab:].any()
    return outcomes


@pytest.mark.parametrize(("tp", "sp"), LAYOUTS)
@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_loss_equals_plain_cross_entropy(pool, chunk, kind, tp, sp) -> None:
    outcomes = check(pool, tp, sp, 97, chunk, kind)
    assert [o.notes["heard"] for o in outcomes] == [1] * tp


@pytest.mark.parametrize(("tp", "sp"), LAYOUTS)
@pytest.mark.parametrize("vocab", [1, 27, 78, 104])  # with tp=4, 78 leaves a shard of padding alone
@pytest.mark.parametrize("chunk", [0, 5])
def test_any_share_of_padding(pool, chunk, vocab, tp, sp) -> None:
    check(pool, tp, sp, vocab, chunk, "random")


@pytest.mark.parametrize(("tp", "sp"), LAYOUTS)
@pytest.mark.parametrize("chunk", [0, 5])
def test_non_contiguous_hidden_states(pool, chunk, tp, sp) -> None:
    check(pool, tp, sp, 97, chunk, "random", ("transposed",))


@pytest.mark.parametrize("chunk", [0, 5])
def test_frozen_head_gets_no_gradient_but_passes_one_on(pool, chunk) -> None:
    outcomes = check(pool, 2, True, 97, chunk, "random", ("frozen",))
    for outcome in outcomes:
        assert outcome.notes["heard"] == 0
        assert not outcome.grads["weight"][1].any()


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("tp", [2, 4])
def test_traffic_never_grows_with_the_vocabulary(pool, chunk, tp) -> None:
    """Three numbers a token are gathered, in one collective however many chunks there are."""
    share = (tp - 1) / tp * 8
    stats, half = share * tp * TOKENS * 3, share * TOKENS * WIDTH
    plain = {
        "all_gather/tp": {"calls": 1, "bytes_sent": stats},
        "all_reduce/tp": {"calls": 1, "bytes_sent": 2 * half},
    }
    parallel = {
        "all_gather/tp": {"calls": 3, "bytes_sent": stats + 2 * half},
        "reduce_scatter/tp": {"calls": 1, "bytes_sent": half},
    }
    for sp, want in ((False, plain), (True, parallel)):
        for outcome in pool.run(head_loss, tp, sp, 97, chunk, "random", ()):
            assert outcome.notes["ledger"] == want
