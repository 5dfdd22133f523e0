"""Feed-forward block, gated (SwiGLU) or not (GELU).

A gated block packs gate and up projection into one of global shape [2, F, D] named `gate_up`; a
plain one has `up` of shape [F, D].
"""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.layout.sharding import Matrices
from megalite.tensor_parallel.context import TensorParallel
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) or down(gelu(up(x))); x is [T, D], or [t, D] under sp."""

    def __init__(
        self, tp: TensorParallel, name: str, config: ModelConfig, *, keep_activation: bool
    ) -> None:
        super().__init__()
        hidden, ffn, bias = config.hidden_size, config.ffn_hidden_size, config.linear_bias
        if config.gated:
            self.up = ColumnParallelLinear(
                tp,
                f"{name}.gate_up",
                (2, ffn, hidden),
                shard_dim=1,
                bias=bias,
                matrices=Matrices(0, (1, 1)),
            )
        else:
            self.up = ColumnParallelLinear(tp, f"{name}.up", (ffn, hidden), bias=bias)
        self.down = RowParallelLinear(
            tp,
            f"{name}.down",
            (hidden, ffn),
            bias=bias,
            activation=config.activation,
            keep_activation=keep_activation,
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y
