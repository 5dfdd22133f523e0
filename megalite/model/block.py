"""One transformer layer: attention and feed-forward block with their norms."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.config import ModelConfig
from megalite.model.attention import SelfAttention
from megalite.model.dropout import Dropout
from megalite.model.mlp import MLP
from megalite.model.norm import Norm, Specs, optional_norm
from megalite.model.sequence import Sequences
from megalite.tensor_parallel.context import LayerContext

Recompute = Literal["none", "selective", "full"]


class TransformerLayer(nn.Module):
    """x + m dropout(post(attention(norm(x)))), then the same with the feed-forward block.

    m is the residual multiplier. Of norm and post each layer has the one or both; where the
    residual is parallel, both blocks read the same x.

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
        self.parallel = config.parallel_residual
        self.attention_norm = optional_norm(context, specs, f"{name}.attention_norm", config)
        self.attention = SelfAttention(
            context, specs, f"{name}.attention", config, layer=index, recompute_core=selective
        )
        self.attention_dropout = Dropout(
            context, config.residual_dropout, index, "attention output"
        )
        post = f"{name}.attention_post_norm"
        self.attention_post_norm = optional_norm(context, specs, post, config)
        self.mlp_norm = optional_norm(context, specs, f"{name}.mlp_norm", config)
        self.mlp = MLP(context, specs, f"{name}.mlp", config, keep_activation=not selective)
        self.mlp_post_norm = optional_norm(context, specs, f"{name}.mlp_post_norm", config)
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
        at = sequences.dropout
        x, normed = enter(self.attention_norm, x, delta)
        out = leave(self.attention_post_norm, self.attention(normed, sequences))
        delta = times(self.attention_dropout(out, at), self.multiplier)

        # A parallel block reads the stream as attention did, so its sum comes after it.
        x, normed = enter(self.mlp_norm, x, None if self.parallel else delta)
        out = leave(self.mlp_post_norm, self.mlp(normed))
        more = times(self.mlp_dropout(out, at), self.multiplier)
        return x, delta + more if self.parallel else more


def enter(norm: Norm | None, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """(s, input of a block) of s = x + delta: its norm, or s where there is none."""
    if norm is None:
        s = sum_of(x, delta)
        return s, s
    both: tuple[Tensor, Tensor] = norm(x, delta)
    return both


def leave(norm: Norm | None, y: Tensor) -> Tensor:
    """A block's output y, normed where there is a norm."""
    if norm is None:
        return y
    normed: Tensor = norm(y)[1]
    return normed


def times(x: Tensor, factor: float) -> Tensor:
    """factor * x; a factor of 1 takes no operation."""
    return x if factor == 1 else x * factor


def sum_of(x: Tensor, delta: Tensor | None) -> Tensor:
    """The residual stream as one tensor."""
    return x if delta is None else x + delta
