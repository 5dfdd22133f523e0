"""Feed-forward block, gated (SwiGLU, GeGLU) or not (GELU, squared ReLU).

A gated block packs gate and up projection into one of global shape [2, F, D] named `gate_up`; a
plain one has `up` of shape [F, D].
"""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.norm import Specs
from megalite.tensor_parallel.context import LayerContext
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """down(f(gate(x)) * up(x)) or down(f(up(x))); x is [T, D], or [t, D] under sp."""

    def __init__(
        self,
        context: LayerContext,
        specs: Specs,
        name: str,
        config: ModelConfig,
        *,
        keep_activation: bool,
    ) -> None:
        super().__init__()
        up = f"{name}.gate_up" if config.gated else f"{name}.up"
        self.up = ColumnParallelLinear(context, specs[f"{up}.weight"], specs.get(f"{up}.bias"))
        self.down = RowParallelLinear(
            context,
            specs[f"{name}.down.weight"],
            specs.get(f"{name}.down.bias"),
            activation=config.activation,
            keep_activation=keep_activation,
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y
