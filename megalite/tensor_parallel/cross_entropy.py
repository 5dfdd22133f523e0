"""Cross entropy per token over logits whose vocabulary is split over tp, and its extras.

Each shard reduces its logits to three numbers a token (maximum, sum of exponentials, target
logit); one all-gather of [T, 3] merges them. Neither a gathered nor a float32 copy of the logits is
ever made, and the gradient overwrites the logits.

Extras, for training alone (a loss without gradients is always the plain one):

* label smoothing e: the target is (1 - e) * logit[label] + e * mean of the logits over the true
  vocabulary, padding left out (Szegedy et al. 2016);
* z-loss z: each token adds z * log-sum-exp^2, which keeps the logits from drifting (Chowdhery et
  al. 2022, PaLM).

Shapes: T tokens, D model, v = padded vocabulary / tp; t = T / tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalite.distributed import comm
from megalite.tensor_parallel.context import LayerContext


@dataclass(frozen=True)
class LossExtras:
    """Coefficients of the terms added to the cross entropy; none by default."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0


PLAIN = LossExtras()


class VocabShard:
    """This rank's columns of the true vocabulary (the others are padding), and the loss over them.

    `extras` apply only while gradients are recorded. With z-loss, `parts_T` are the cross entropy
    and the z-loss [T] of the last call, and `tally` adds them up for the log.
    """

    def __init__(
        self,
        context: LayerContext,
        vocab_size: int,
        padded_vocab_size: int,
        extras: LossExtras = PLAIN,
    ) -> None:
        self.context, self.vocab_size, self._extras = context, vocab_size, extras
        self.parts_T: tuple[Tensor, Tensor] | None = None
        self._sums = torch.zeros(2, dtype=torch.float64, device=context.device)
        width = padded_vocab_size // context.tp.size
        self.first_column = width * context.tp.rank
        self.num_columns = min(width, max(0, vocab_size - self.first_column))

    @property
    def extras(self) -> LossExtras:
        """The extras of a loss that is computed now."""
        return self._extras if torch.is_grad_enabled() else PLAIN

    def stats(self, logits_Tv: Tensor, label_T: Tensor, extras: LossExtras) -> Tensor:
        """[T, 3]: maximum, sum of exponentials and target logit over this rank's columns."""
        return self.context.ops.cross_entropy_stats(
            logits_Tv,
            label_T,
            self.first_column,
            self.num_columns,
            smoothing=extras.label_smoothing,
            vocab_size=self.vocab_size,
        )

    def combine(self, stats_T3: Tensor, extras: LossExtras) -> tuple[Tensor, Tensor]:
        """(loss[T], log-sum-exp[T]) of the whole vocabulary; the same bits on every tp rank."""
        stats = comm.all_gather(stats_T3, self.context.tp)
        stats_rT3 = stats.view(self.context.tp.size, *stats_T3.shape)
        loss_T, lse_T = self.context.ops.cross_entropy_combine(stats_rT3)
        self.parts_T = None
        if extras.z_loss:
            z_T = lse_T.square() * extras.z_loss
            self.parts_T = (loss_T, z_T)
            loss_T = loss_T + z_T
        return loss_T, lse_T

    def grad_(
        self,
        logits_Tv: Tensor,
        label_T: Tensor,
        lse_T: Tensor,
        dloss_T: Tensor,
        extras: LossExtras,
    ) -> Tensor:
        """The gradient of `logits_Tv`, written over them."""
        return self.context.ops.cross_entropy_grad_(
            logits_Tv,
            label_T,
            lse_T,
            dloss_T,
            self.first_column,
            self.num_columns,
            z_loss=extras.z_loss,
            smoothing=extras.label_smoothing,
            vocab_size=self.vocab_size,
        )

    @torch.no_grad()
    def tally(self, weight_T: Tensor) -> None:
        """Add the last call's parts, weighted, to the sums that `take_parts` returns."""
        if self.parts_T is not None:
            self._sums += torch.stack([torch.dot(part, weight_T) for part in self.parts_T])
            self.parts_T = None

    def take_parts(self) -> Tensor:
        """(cross entropy, z-loss) summed since the last call, float64; only with z-loss."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums


def vocab_parallel_cross_entropy(logits_Tv: Tensor, label_T: Tensor, shard: VocabShard) -> Tensor:
    """Loss[T] = log-sum-exp(logits) - logits[label], float32 (float64 for float64 logits).

    With the shard's extras added. The backward overwrites `logits_Tv` with its gradient, so the
    logits serve once.
    """
    return _CrossEntropy.apply(logits_Tv, label_T, shard, shard.extras)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_Tv: Tensor, label_T: Tensor, shard: VocabShard, extras: LossExtras
    ) -> Tensor:
        loss_T, lse_T = shard.combine(shard.stats(logits_Tv, label_T, extras), extras)
        ctx.save_for_backward(logits_Tv, label_T, lse_T)
        ctx.shard, ctx.extras = shard, extras
        return loss_T

    @staticmethod
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Tensor, None, None, None]:
        logits_Tv, label_T, lse_T = ctx.saved_tensors
        grad_Tv = ctx.shard.grad_(logits_Tv, label_T, lse_T, dloss_T, ctx.extras)
        return grad_Tv, None, None, None


def chunked_linear_cross_entropy(
    x: Tensor, weight: nn.Parameter, label_T: Tensor, shard: VocabShard, chunk_tokens: int
) -> Tensor:
    """Loss[T] of logits x @ weight[v, D]^T, at most `chunk_tokens` rows of logits alive at a time.

    x: [T, D], or [t, D] under sequence parallelism. The backward computes each chunk's logits
    again, so that memory does not grow with T * V; each token has its own upstream gradient.
    """
    return _ChunkedLinearCrossEntropy.apply(x, weight, label_T, shard, chunk_tokens, shard.extras)


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        label_T: Tensor,
        shard: VocabShard,
        chunk_tokens: int,
        extras: LossExtras,
    ) -> Tensor:
        context = shard.context
        x_TD = comm.all_gather(x, context.tp) if context.sequence_parallel else x
        chunks = [slice(i, i + chunk_tokens) for i in range(0, len(x_TD), chunk_tokens)]
        logits = (context.ops.linear(x_TD[c], weight) for c in chunks)
        stats = [shard.stats(x, label_T[c], extras) for x, c in zip(logits, chunks, strict=True)]
        loss_T, lse_T = shard.combine(torch.cat(stats), extras)
        ctx.save_for_backward(x, weight, label_T, lse_T)
        ctx.weight, ctx.shard, ctx.chunks, ctx.extras = weight, shard, chunks, extras
        return loss_T

    @staticmethod
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x, weight_vD, label_T, lse_T = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        context = shard.context
        x_TD = comm.all_gather(x, context.tp) if context.sequence_parallel else x
        dx_TD = torch.empty_like(x_TD)

        def accumulate(buffer_vD: Tensor | None) -> None:
            for c in ctx.chunks:
                logits = context.ops.linear(x_TD[c], weight_vD)
                dlogits = shard.grad_(logits, label_T[c], lse_T[c], dloss_T[c], ctx.extras)
                dx_TD[c] = context.ops.linear_input_grad(dlogits, weight_vD)
                if buffer_vD is not None:
                    context.ops.accumulate_weight_grad_(buffer_vD, dlogits, x_TD[c])
                del logits, dlogits  # before the next chunk's are allocated

        if ctx.weight.requires_grad:
            context.grads.add(ctx.weight, accumulate)
        else:
            accumulate(None)
        reduce = comm.reduce_scatter if context.sequence_parallel else comm.all_reduce
        return reduce(dx_TD, context.tp), None, None, None, None, None
