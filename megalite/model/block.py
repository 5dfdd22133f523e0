"""One transformer layer: pre-norm attention and feed-forward on the residual stream."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.config import ModelConfig
from megalite.model.attention import SelfAttention
from megalite.model.dropout import Dropout
from megalite.model.mlp import MLP
from megalite.model.norm import Specs, make_norm
from megalite.model.sequence import Sequences
from megalite.tensor_parallel.context import LayerContext

Recompute = Literal["none", "selective", "full"]


class TransformerLayer(nn.Module):
    """x + m dropout(attention(norm(x))), then + m dropout(mlp(norm(.))), m the residual multiplier.

    The residual stream passes between layers as (x, delta), whose sum the next norm makes; delta is
    None where there is nothing to add.

    recompute: "none" keeps every intermediate; "selective" recomputes rotated heads, attention and
    the activation in the backward; "full" keeps only the layer's input.
    """

    def __init__(
        self,
        context: LayerContext,
        specs: Specs,
        index: int,
        config: ModelConfig,
        recompute: Recompute,
    ) -> None:
        super().__init__()
        name = f"layers.{index}"
        selective = recompute == "selective"
        self.recompute_layer = recompute == "full"
        self.multiplier = config.residual_multiplier
        self.attention_norm = make_norm(context, specs, f"{name}.attention_norm", config)
        self.attention = SelfAttention(
            context, specs, f"{name}.attention", config, layer=index, recompute_core=selective
        )
        self.attention_dropout = Dropout(
            context, config.residual_dropout, index, "attention output"
        )
        self.mlp_norm = make_norm(context, specs, f"{name}.mlp_norm", config)
        self.mlp = MLP(context, specs, f"{name}.mlp", config, keep_activation=not selective)
        self.mlp_dropout = Dropout(context, config.residual_dropout, index, "mlp output")

    def forward(
        self, x: Tensor, delta: Tensor | None, sequences: Sequences
    ) -> tuple[Tensor, Tensor | None]:
        if self.recompute_layer and torch.is_grad_enabled():
            # Kept instead of all intermediates: one tensor, the sum.
            y: Tensor = checkpoint(
                lambda x: sum_of(*self.run(x, None, sequences)),
                sum_of(x, delta),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            return y, None
        return self.run(x, delta, sequences)

    def run(self, x: Tensor, delta: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """The layer itself: [T, D] tensors in and out, or [t, D] under sequence parallelism."""
        x, normed = self.attention_norm(x, delta)
        delta = self.attention_dropout(self.attention(normed, sequences), sequences.dropout)
        x, normed = self.mlp_norm(x, times(delta, self.multiplier))
        delta = self.mlp_dropout(self.mlp(normed), sequences.dropout)
        return x, times(delta, self.multiplier)


def times(x: Tensor, factor: float) -> Tensor:
    """factor * x; a factor of 1 takes no operation."""
    return x if factor == 1 else x * factor


def sum_of(x: Tensor, delta: Tensor | None) -> Tensor:
    """The residual stream as one tensor."""
    return x if delta is None else x + delta
