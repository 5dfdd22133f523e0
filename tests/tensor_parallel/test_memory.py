"""No logits tensor of tokens x vocabulary: neither gathered over tp, nor in float32, nor whole."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.mesh import Mesh
from megalite.layout.sharding import ShardSpec
from megalite.layout.topology import Topology
from megalite.tensor_parallel.context import LayerContext
from megalite.tensor_parallel.cross_entropy import (
    VocabShard,
    chunked_linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megalite.tensor_parallel.linear import ColumnParallelLinear
from tests.tensor_parallel.kit.memory import AllocationMeter
from tests.tensor_parallel.kit.pieces import (
    draw,
    fill,
    present,
    relative_error,
    tensor_parallel,
    tokens_of,
)
from tests.tolerances import FLOAT32, PLAIN_FLOAT64


def make_head(context: LayerContext, vocab: int, padded: int, width: int):
    spec = ShardSpec("head.weight", (padded, width), 0)
    layer = ColumnParallelLinear(context, spec)
    fill(layer)
    return layer, VocabShard(context, vocab, padded)


@dataclass
class Head:
    """A head on one process, hidden states, labels, and each token's upstream gradient."""

    tokens: int
    vocab: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        context = LayerContext(Mesh(Topology()).tp, self.dtype, torch.device("cpu"))
        self.padded = -(-self.vocab // 64) * 64
        self.layer, self.shard = make_head(context, self.vocab, self.padded, width=8)
        self.grad = context.grads.buffer(self.layer.weight)
        self.x = draw("x", self.tokens, 8, dtype=self.dtype).requires_grad_()
        self.label = torch.arange(self.tokens) * 24 % self.vocab
        self.upstream = draw("upstream", self.tokens, dtype=self.dtype)

    def chunked(self, chunk: int) -> tuple[AllocationMeter, Tensor]:
        with AllocationMeter() as meter:
            loss = chunked_linear_cross_entropy(
                self.x, self.layer.weight, self.label, self.shard, chunk
            )
            loss.backward(self.upstream)
        return meter, loss.detach()


def test_chunked_loss_takes_less_than_half_of_the_naive_memory() -> None:
    head = Head(300, 4000, torch.float64)
    x = head.x.detach().clone().requires_grad_()
    weight = head.layer.weight.detach()[: head.vocab].clone().requires_grad_()
    with AllocationMeter() as naive:
        want = F.cross_entropy(x @ weight.t(), head.label, reduction="none")
        want.backward(head.upstream)
    chunked, loss = head.chunked(32)
    assert naive.peak_bytes >= 2 * head.tokens * head.vocab * 8  # what the next test relies on
    assert chunked.peak_bytes < naive.peak_bytes / 2
    assert relative_error(loss, want) <= PLAIN_FLOAT64
    assert relative_error(present(head.x.grad), present(x.grad)) <= PLAIN_FLOAT64
    assert relative_error(head.grad[: head.vocab], present(weight.grad)) <= PLAIN_FLOAT64


@pytest.mark.long
def test_memory_at_a_real_vocabulary() -> None:
    head = Head(2000, 50_000, torch.float32)
    chunked, loss = head.chunked(256)
    assert chunked.peak_bytes < head.tokens * head.vocab * 4  # half of the naive one's
    assert chunked.largest_elements <= 256 * head.padded
    some = slice(250, 270)  # across two chunks
    logits = head.x[some].double() @ head.layer.weight[: head.vocab].double().t()
    want = F.cross_entropy(logits, head.label[some], reduction="none")
    assert relative_error(loss[some], want) <= FLOAT32


def measure_loss(ctx, sp, chunk, dtype) -> dict[str, int]:
    """Memory of both passes of one rank's loss, logits included."""
    tokens, vocab, padded, width = 64, 3997, 4000, 16
    context = tensor_parallel(ctx, sp, dtype=dtype)
    layer, shard = make_head(context, vocab, padded, width)
    context.grads.buffer(layer.weight)
    x = tokens_of(draw("x", tokens, width, dtype=dtype), context).requires_grad_()
    label = torch.arange(tokens) * 61 % vocab
    with AllocationMeter() as meter:
        if chunk:
            loss = chunked_linear_cross_entropy(x, layer.weight, label, shard, chunk)
        else:
            loss = vocab_parallel_cross_entropy(layer(x), label, shard)
        loss.backward(draw("upstream", tokens, dtype=loss.dtype))
    assert meter.peak_bytes > 0
    return {
        "elements": meter.largest_elements,
        "shard": tokens * padded // ctx.world_size,
        "chunk": max(chunk * padded // ctx.world_size, padded * width // ctx.world_size),
        "bytes": meter.largest_bytes,
    }


@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True), (4, True)])
def test_no_rank_ever_holds_more_than_its_shard_of_logits(pool, tp, sp, dtype, chunk) -> None:
    for found in pool.run(measure_loss, tp, sp, chunk, dtype):
        assert found["elements"] <= found["chunk" if chunk else "shard"]
