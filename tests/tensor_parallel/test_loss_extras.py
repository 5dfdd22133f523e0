"""Label smoothing and z-loss against autograd of the plain formulas, at every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.cross_entropy import (
    PLAIN,
    LossExtras,
    VocabShard,
    chunked_linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megalite.tensor_parallel.linear import ColumnParallelLinear
from tests.pool import RankPool, traffic
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
    whole_gradient,
    whole_tokens,
)
from tests.tolerances import PLAIN_FLOAT64

TOKENS, WIDTH = 12, 6
PADDED = {97: 104, 131: 136, 3: 8}  # of 3, most shards of four are padding alone
EXTRAS = {
    "z": LossExtras(z_loss=1e-2),
    "smoothing": LossExtras(label_smoothing=0.1),
    "both": LossExtras(z_loss=0.3, label_smoothing=0.4),
}


def labels(vocab: int) -> Tensor:
    label = torch.arange(TOKENS) * 7 % vocab
    edges = torch.tensor([0, 25, 26, 33, 34, 67, 68, vocab - 1]) % vocab  # of the shards
    label[: len(edges)] = edges
    return label


def weights() -> Tensor:
    """A ragged mask, normalised over the step's tokens, of which these are a part."""
    valid = torch.ones(TOKENS, dtype=torch.float64)
    valid[[2, 3, 9]] = 0.0
    return valid / 23.0


def sharded(ctx, sp, vocab, chunk, extras: LossExtras) -> Outcome:
    context = tensor_parallel(ctx, sp)
    spec = ShardSpec("head.weight", (PADDED[vocab], WIDTH), 0)
    layer = ColumnParallelLinear(context, spec)
    fill(layer)
    x = tokens_of(3.0 * draw("x", TOKENS, WIDTH), context).requires_grad_()
    shard = VocabShard(context, vocab, PADDED[vocab], extras)

    def loss_of() -> Tensor:
        if chunk:
            return chunked_linear_cross_entropy(x, layer.weight, labels(vocab), shard, chunk)
        return vocab_parallel_cross_entropy(layer(x), labels(vocab), shard)

    with torch.no_grad():
        plain = loss_of()
        shard.tally(weights())
    assert not shard.take_parts().any(), "a loss without gradients has no extras"
    loss = loss_of()
    shard.tally(weights())
    torch.dot(loss, weights()).backward()
    notes = {
        "plain": plain,
        "parts": shard.take_parts(),
        "ledger": traffic(context.tp.ledger)["all_gather/tp"] if context.tp.size > 1 else None,
    }
    assert not shard.take_parts().any(), "taken twice"
    return Outcome(loss.detach(), x.grad, gradients_of(layer), notes)


def formula(vocab: int, extras: LossExtras) -> dict[str, Tensor]:
    """log-softmax over the true columns, written out."""
    x = (3.0 * draw("x", TOKENS, WIDTH)).requires_grad_()
    weight = draw("head.weight", PADDED[vocab], WIDTH).requires_grad_()
    logits = x @ weight[:vocab].t()
    lse = logits.logsumexp(1)
    log_p = logits - lse.unsqueeze(1)
    plain = -log_p.gather(1, labels(vocab).unsqueeze(1)).squeeze(1)
    smooth = (1 - extras.label_smoothing) * plain - extras.label_smoothing * log_p.mean(1)
    z = extras.z_loss * lse.square()
    torch.dot(smooth + z, weights()).backward()
    parts = torch.stack([torch.dot(smooth, weights()), torch.dot(z, weights())])
    return {
        "plain": plain.detach(),
        "loss": (smooth + z).detach(),
        "parts": parts.detach(),
        "dx": present(x.grad),
        "dweight": present(weight.grad),
    }


@pytest.mark.parametrize(("tp", "sp"), LAYOUTS)
@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("vocab", PADDED)
def test_extras_equal_their_formulas(
    pool: RankPool, vocab: int, chunk: int, name: str, tp: int, sp: bool
) -> None:
    extras = EXTRAS[name]
    outcomes = pool.run(sharded, tp, sp, vocab, chunk, extras)
    want = formula(vocab, extras)

    def close(got: Tensor, key: str) -> None:
        assert relative_error(got, want[key]) <= PLAIN_FLOAT64, key

    close(same_everywhere([o.output for o in outcomes]), "loss")
    close(same_everywhere([o.notes["plain"] for o in outcomes]), "plain")
    close(whole_tokens([o.input_grad for o in outcomes], sp), "dx")
    gradient = whole_gradient(outcomes, "weight")
    close(gradient, "dweight")
    assert not gradient[vocab:].any()
    parts = same_everywhere([o.notes["parts"] for o in outcomes])
    if extras.z_loss:
        close(parts, "parts")
    else:
        assert not parts.any()


def test_extras_add_no_traffic(pool: RankPool) -> None:
    for sp in (False, True):
        ledgers = [
            pool.run(sharded, 2, sp, 97, 0, extras)[0].notes["ledger"]
            for extras in (PLAIN, EXTRAS["both"])
        ]
        assert ledgers[0] == ledgers[1]
