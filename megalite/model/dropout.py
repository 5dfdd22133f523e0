"""Dropout whose mask is a function of (seed, step, layer, kind, global position, column).

There is no generator and no state: the mask of a token is the same on whichever rank, in whichever
microbatch and however often it is computed, so layouts agree, recompute repeats it, and a resumed
run goes on with it. The recipe of the mask is in kernels/plain/dropout.py. A batch without a
`DropoutAt` (evaluation, generation) drops nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalite.kernels import Kernels
from megalite.tensor_parallel.context import LayerContext

Key = tuple[int, int]


@dataclass(frozen=True)
class DropoutAt:
    """The place of a microbatch: the run's seed, the step, and its first token in the global batch.

    first_token is counted from 0 over the whole global batch, in the order of its samples.
    """

    seed: int
    step: int
    first_token: int

    def later(self, tokens: int) -> DropoutAt:
        """The place that lies `tokens` tokens further on."""
        return replace(self, first_token=self.first_token + tokens)

    def key(self, layer: int, kind: str) -> Key:
        """Key of one use of dropout: two words of SHA-256 of its name."""
        name = f"dropout/{self.seed}/{self.step}/{layer}/{kind}"
        digest = hashlib.sha256(name.encode()).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


class Dropout:
    """Dropout of rows [T, D] ([t, D] under sequence parallelism) with probability p.

    layer -1 is the embedding. With tp and without sequence parallelism every rank holds the same
    tokens and draws the same mask.
    """

    def __init__(self, context: LayerContext, p: float, layer: int, kind: str) -> None:
        self.context, self.p, self.layer, self.kind = context, p, layer, kind

    def __call__(self, x_TD: Tensor, at: DropoutAt | None) -> Tensor:
        if self.p == 0 or at is None:
            return x_TD
        shard = self.context.tp.rank if self.context.sequence_parallel else 0
        first = at.first_token + shard * len(x_TD)
        return _Dropout.apply(x_TD, at.key(self.layer, self.kind), self.p, first, self.context.ops)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, key: Key, p: float, first_token: int, ops: Kernels
    ) -> Tensor:
        y_TD, keep_TD = ops.dropout(x_TD, key, p, first_token)
        ctx.save_for_backward(keep_TD)
        ctx.ops, ctx.arguments = ops, (key, p, first_token)
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None, None, None]:
        (keep_TD,) = ctx.saved_tensors
        return ctx.ops.dropout(dy_TD, *ctx.arguments, keep_TD)[0], None, None, None, None
