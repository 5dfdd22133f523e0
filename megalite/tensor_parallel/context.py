"""The context that the layers of a chunk share: tp axis, dtype, kernels and gradient store."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megalite import kernels
from megalite.distributed.mesh import Axis
from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.grads import GradStore


@dataclass(frozen=True)
class LayerContext:
    """Ranks, dtype, device and kernels of the layers of one chunk.

    sequence_parallel: activations between layers are sharded over tokens.
    overlap: the input gradient's collective is in flight during the weight gradient (same bits).
    ops: the kernels that compute everything between the collectives.
    grads: the store of the chunk's weight gradients.
    """

    tp: Axis
    dtype: torch.dtype
    device: torch.device
    sequence_parallel: bool = False
    overlap: bool = True
    grads: GradStore = field(default_factory=GradStore)
    ops: kernels.Kernels = field(default_factory=kernels.Kernels)

    def new_parameter(self, spec: ShardSpec) -> nn.Parameter:
        """Uninitialised parameter that holds this rank's block of `spec`."""
        assert spec.grid.cut_axis == "tp" or spec.cut_dim is None, f"{spec.name} is not cut by tp"
        shape = spec.local_shape(self.tp.size)
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))


class ShardedModule(nn.Module):
    """A layer with `specs` of its own parameters, by attribute name."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        self.specs: dict[str, ShardSpec] = {}

    def add_parameter(self, attribute: str, spec: ShardSpec) -> nn.Parameter:
        """Create and register the parameter that `spec` describes."""
        param = self.context.new_parameter(spec)
        self.register_parameter(attribute, param)
        self.specs[attribute] = spec
        return param

    def add_optional_parameter(self, attribute: str, spec: ShardSpec | None) -> nn.Parameter | None:
        """As `add_parameter`; without a spec the attribute is None."""
        if spec is None:
            self.register_parameter(attribute, None)
            return None
        return self.add_parameter(attribute, spec)

    def accumulate_rowwise(self, param: nn.Parameter, partial: Tensor) -> None:
        """Add the gradient of a bias or norm weight, or rows that sum to it, to the main gradient.

        partial: [P, ...] or [...], finished now.
        """
        add_ = self.context.ops.add_column_sums_
        size = param.numel()
        self.context.grads.add(param, lambda buffer: add_(buffer.view(-1), partial.view(-1, size)))
