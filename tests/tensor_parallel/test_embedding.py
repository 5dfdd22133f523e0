"""The vocabulary-parallel embedding against a plain look-up."""

from __future__ import annotations

import pytest
import torch

from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.embedding import VocabParallelEmbedding
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

ROWS, WIDTH = 12, 6
# The edges of every shard of 4, tokens that come back, and shards that see none of the second half.
TOKENS = torch.tensor([0, 2, 3, 5, 6, 8, 9, 11, 0, 0, 1, 0])


def look_up(ctx, sp, strides, frozen) -> Outcome:
    context = tensor_parallel(ctx, sp)
    layer = VocabParallelEmbedding(context, ShardSpec("embedding.weight", (ROWS, WIDTH), 0))
    fill(layer)
    heard: list[torch.nn.Parameter] = []
    context.grads.listener = heard.append
    layer.weight.requires_grad_(not frozen)
    y = layer(TOKENS)
    dy = tokens_of(draw("dy", len(TOKENS), WIDTH), context)
    if strides == "expanded":
        dy = torch.ones((), dtype=torch.float64).expand(dy.shape)
    if not frozen:
        y.backward(transposed(dy) if strides == "transposed" else dy)
    notes = {"heard": len(heard), "needs grad": y.requires_grad}
    notes["ledger"] = traffic(context.tp.ledger)
    return Outcome(y.detach(), None, gradients_of(layer), notes)


@pytest.mark.parametrize(("tp", "sp"), LAYOUTS)
@pytest.mark.parametrize("strides", ["rows", "transposed", "expanded"])
def test_embedding_equals_a_look_up(pool, strides, tp, sp) -> None:
    outcomes = pool.run(look_up, tp, sp, strides, False)
    weight = draw("embedding.weight", ROWS, WIDTH).requires_grad_()
    want = weight[TOKENS]
    dy = torch.ones(want.shape) if strides == "expanded" else draw("dy", *want.shape)
    want.backward(dy.double())
    got = whole_tokens([o.output for o in outcomes], sp)
    assert torch.equal(got, want)
    assert relative_error(whole_gradient(outcomes, "weight"), present(weight.grad)) <= PLAIN_FLOAT64
    assert [o.notes["heard"] for o in outcomes] == [1] * tp


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_traffic_is_what_theory_says(pool, tp) -> None:
    half = (tp - 1) / tp * len(TOKENS) * WIDTH * 8
    whole = {"all_reduce/tp": {"calls": 1, "bytes_sent": 2 * half}}
    halves = {op: {"calls": 1, "bytes_sent": half} for op in ("all_gather/tp", "reduce_scatter/tp")}
    for sp, want in ((False, whole), (True, halves)):
        ledgers = [o.notes["ledger"] for o in pool.run(look_up, tp, sp, "rows", False)]
        assert ledgers == [want if tp > 1 else {}] * tp


def test_frozen_embedding_needs_no_gradient(pool) -> None:
    outcomes = pool.run(look_up, 2, False, "rows", True)
    assert [(o.notes["heard"], o.notes["needs grad"]) for o in outcomes] == [(0, False)] * 2
    assert torch.equal(
        same_everywhere([o.output for o in outcomes]), draw("embedding.weight", ROWS, WIDTH)[TOKENS]
    )
