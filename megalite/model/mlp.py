"""SwiGLU feed-forward block. The packed gate and up projection has global shape [2, F, D]."""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.tensor_parallel.context import TensorParallel
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); x is [T, D], or [t, D] under sequence parallelism."""

    def __init__(
        self, tp: TensorParallel, name: str, config: ModelConfig, *, keep_activation: bool
    ) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        self.gate_up = ColumnParallelLinear(tp, f"{name}.gate_up", (2, ffn, hidden), shard_dim=1)
        self.down = RowParallelLinear(
            tp, f"{name}.down", (hidden, ffn), gated=True, keep_activation=keep_activation
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.gate_up(x))
        return y
