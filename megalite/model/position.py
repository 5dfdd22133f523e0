"""Positions of tokens: tables of rotation angles, or a learned vector for each place.

Shapes: T tokens of a microbatch (this rank's shard t under sequence parallelism), D model, S rows
of the table, s tokens of a sequence. A token's position is counted from its sequence's start, or,
where they are learned, from what the microbatch gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite import kernels
from megalite.config import ModelConfig, Rotation
from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.context import LayerContext, ShardedModule


def rotary_tables(
    config: ModelConfig,
    rotation: Rotation,
    seq_length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """cos and sin [seq_length, R/2] for a kind of layers; with R = 0 nothing is rotated."""
    if rotation == "none":
        return kernels.rope_tables(seq_length, 0, config.rope_theta, dtype, device)
    if rotation == "local":
        theta = config.rope_local_theta
        assert theta is not None, "a local rotation has a base of its own"
        return kernels.rope_tables(seq_length, config.rotary_size, theta, dtype, device)
    factor, length = config.rope_factor, config.rope_original_max_position
    scaling: kernels.RopeScaling | None = None
    if config.rope_scaling == "linear":
        scaling = kernels.LinearScaling(factor)
    elif config.rope_scaling == "llama3":
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        scaling = kernels.Llama3Scaling(factor, low, high, length)
    elif config.rope_scaling == "yarn":
        fast, slow = config.rope_beta_fast, config.rope_beta_slow
        gain, truncate = config.rope_attention_factor, config.rope_truncate
        scaling = kernels.YarnScaling(factor, length, fast, slow, truncate, gain)
    return kernels.rope_tables(
        seq_length, config.rotary_size, config.rope_theta, dtype, device, scaling
    )


class PositionEmbedding(ShardedModule):
    """x + W[position]; every tp rank holds the whole table [S, D] and adds it to its own tokens.

    Under sequence parallelism the table's gradient is therefore a partial sum over tp.
    """

    def __init__(self, context: LayerContext, spec: ShardSpec, seq_length: int) -> None:
        super().__init__(context)
        assert seq_length <= spec.shape[0], (seq_length, spec.shape)
        self.weight = self.add_parameter("weight", spec)

    def forward(self, x: Tensor, position_T: Tensor | int) -> Tensor:
        """x: [T, D] or [t, D]; position_T: of all T tokens, or the length of their sequences."""
        shard = self.context.tp.rank if self.context.sequence_parallel else 0
        first, stop = shard * len(x), (shard + 1) * len(x)
        if isinstance(position_T, int):
            own = torch.arange(first, stop, device=x.device) % position_T
        else:
            own = position_T[first:stop]
        return _AddPosition.apply(x, self.weight, own, self)


class _AddPosition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, position: Tensor, layer: PositionEmbedding
    ) -> Tensor:
        ctx.save_for_backward(position)
        ctx.layer = layer
        return x + weight[position]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (position,), layer = ctx.saved_tensors, ctx.layer
        ops = layer.context.ops
        layer.context.grads.add(
            layer.weight, lambda buffer: ops.embedding_grad_(buffer, dy, position)
        )
        return dy, None, None, None
