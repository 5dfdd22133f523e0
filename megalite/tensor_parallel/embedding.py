"""Token embedding with the vocabulary split over tp.

Shapes: T tokens, D model, V padded vocabulary; t = T / tp, v = V / tp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed import comm
from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.context import LayerContext, ShardedModule


class VocabParallelEmbedding(ShardedModule):
    """x[T, D] = W[token]; each rank looks up the tokens it owns and the sum over tp is taken.

    Returns [t, D] under sequence parallelism. Token ids are int64 in [0, vocabulary).
    """

    def __init__(self, context: LayerContext, spec: ShardSpec) -> None:
        super().__init__(context)
        self.weight = self.add_parameter("weight", spec)
        self.first_row = spec.local_offsets(context.tp.size, context.tp.rank)[0]

    def forward(self, token_T: Tensor) -> Tensor:
        return _Embedding.apply(token_T, self.weight, self)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token_T: Tensor, weight: Tensor, layer: VocabParallelEmbedding) -> Tensor:
        context = layer.context
        row_T = token_T - layer.first_row  # outside of the weight for tokens of other ranks
        x_TD = F.embedding(row_T.clamp(0, len(weight) - 1), weight)
        if context.tp.size > 1:
            absent_T = (row_T < 0) | (row_T >= len(weight))
            x_TD = x_TD.masked_fill_(absent_T.unsqueeze(1), 0.0)
        ctx.save_for_backward(row_T)
        ctx.layer = layer
        reduce = comm.reduce_scatter if context.sequence_parallel else comm.all_reduce
        return reduce(x_TD, context.tp)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        layer: VocabParallelEmbedding = ctx.layer
        context, (row_T,) = layer.context, ctx.saved_tensors
        dy_TD = comm.all_gather(dy, context.tp) if context.sequence_parallel else dy
        dy_TD = dy_TD.detach()
        # Deferred like the head's gradient, so that a tied weight's sums keep their order.
        context.grads.add(
            layer.weight,
            lambda buffer: context.ops.embedding_grad_(buffer, dy_TD, row_T),
            deferrable=True,
        )
        return None, None, None
