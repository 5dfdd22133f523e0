"""Cross entropy over logits whose vocabulary is split over tp, per token.

Each shard reduces its logits to three numbers a token (maximum, sum of exponentials, target
logit); one all-gather of [T, 3] merges them. Neither a gathered nor a float32 copy of the logits is
ever made, and the gradient overwrites the logits.

Shapes: T tokens, D model, v = padded vocabulary / tp; t = T / tp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalite import kernels
from megalite.distributed import comm
from megalite.tensor_parallel.context import TensorParallel


class VocabShard:
    """Which columns of the true vocabulary this rank's logits hold; the rest is padding."""

    def __init__(self, tp: TensorParallel, vocab_size: int, padded_vocab_size: int) -> None:
        self.tp = tp
        width = padded_vocab_size // tp.axis.size
        self.first_column = width * tp.axis.rank
        self.num_columns = min(width, max(0, vocab_size - self.first_column))

    def stats(self, logits_Tv: Tensor, label_T: Tensor) -> Tensor:
        return kernels.cross_entropy_stats(logits_Tv, label_T, self.first_column, self.num_columns)

    def combine(self, stats_T3: Tensor) -> tuple[Tensor, Tensor]:
        """(loss[T], log-sum-exp[T]) of the whole vocabulary; the same bits on every tp rank."""
        stats = comm.all_gather(stats_T3, self.tp.axis)
        return kernels.cross_entropy_combine(stats.view(self.tp.axis.size, *stats_T3.shape))

    def grad_(self, logits_Tv: Tensor, label_T: Tensor, lse_T: Tensor, dloss_T: Tensor) -> Tensor:
        return kernels.cross_entropy_grad_(
            logits_Tv, label_T, lse_T, dloss_T, self.first_column, self.num_columns
        )


def vocab_parallel_cross_entropy(logits_Tv: Tensor, label_T: Tensor, shard: VocabShard) -> Tensor:
    """Loss[T] = log-sum-exp(logits) - logits[label], float32 (float64 for float64 logits).

    The backward overwrites `logits_Tv` with its gradient, so the logits serve once.
    """
    return _CrossEntropy.apply(logits_Tv, label_T, shard)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_Tv: Tensor, label_T: Tensor, shard: VocabShard) -> Tensor:
        loss_T, lse_T = shard.combine(shard.stats(logits_Tv, label_T))
        ctx.save_for_backward(logits_Tv, label_T, lse_T)
        ctx.shard = shard
        return loss_T

    @staticmethod
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Tensor, None, None]:
        logits_Tv, label_T, lse_T = ctx.saved_tensors
        return ctx.shard.grad_(logits_Tv, label_T, lse_T, dloss_T), None, None


def chunked_linear_cross_entropy(
    x: Tensor, weight: nn.Parameter, label_T: Tensor, shard: VocabShard, chunk_tokens: int
) -> Tensor:
    """Loss[T] of logits x @ weight[v, D]^T, at most `chunk_tokens` rows of logits alive at a time.

    x: [T, D], or [t, D] under sequence parallelism. The backward computes each chunk's logits
    again, so that memory does not grow with T * V; each token has its own upstream gradient.
    """
    return _ChunkedLinearCrossEntropy.apply(x, weight, label_T, shard, chunk_tokens)


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        label_T: Tensor,
        shard: VocabShard,
        chunk_tokens: int,
    ) -> Tensor:
        tp = shard.tp
        x_TD = comm.all_gather(x, tp.axis) if tp.sequence_parallel else x
        chunks = [slice(i, i + chunk_tokens) for i in range(0, len(x_TD), chunk_tokens)]
        stats = [shard.stats(kernels.linear(x_TD[c], weight), label_T[c]) for c in chunks]
        loss_T, lse_T = shard.combine(torch.cat(stats))
        ctx.save_for_backward(x, weight, label_T, lse_T)
        ctx.weight, ctx.shard, ctx.chunks = weight, shard, chunks
        return loss_T

    @staticmethod
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight_vD, label_T, lse_T = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        tp = shard.tp
        x_TD = comm.all_gather(x, tp.axis) if tp.sequence_parallel else x
        dx_TD = torch.empty_like(x_TD)

        def accumulate(buffer_vD: Tensor | None) -> None:
            for c in ctx.chunks:
                logits = kernels.linear(x_TD[c], weight_vD)
                dlogits = shard.grad_(logits, label_T[c], lse_T[c], dloss_T[c])
                dx_TD[c] = kernels.linear_input_grad(dlogits, weight_vD)
                if buffer_vD is not None:
                    kernels.accumulate_weight_grad_(buffer_vD, dlogits, x_TD[c])

        if ctx.weight.requires_grad:
            tp.grads.add(ctx.weight, accumulate)
        else:
            accumulate(None)
        reduce = comm.reduce_scatter if tp.sequence_parallel else comm.all_reduce
        return reduce(dx_TD, tp.axis), None, None, None, None
