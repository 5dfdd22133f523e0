"""What the tensor-parallel layers of a chunk share: axis, switches, gradient store."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megalite import kernels
from megalite.distributed.mesh import Axis
from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.grads import GradStore


@dataclass(frozen=True)
class TensorParallel:
    """The tp axis as layers see it.

    sequence_parallel: activations between layers are sharded over tokens.
    overlap: the input gradient's collective is in flight during the weight gradient (same bits).
    ops: what computes everything between the collectives.
    """

    axis: Axis
    dtype: torch.dtype
    device: torch.device
    sequence_parallel: bool = False
    overlap: bool = True
    grads: GradStore = field(default_factory=GradStore)
    ops: kernels.Kernels = field(default_factory=kernels.Kernels)

    def new_parameter(self, spec: ShardSpec) -> nn.Parameter:
        """Uninitialised parameter holding this rank's piece of `spec`."""
        shape = spec.local_shape(self.axis.size)
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))


class ShardedModule(nn.Module):
    """A layer that knows how its own parameters are sharded (attribute name -> spec)."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.specs: dict[str, ShardSpec] = {}

    def add_parameter(self, attribute: str, spec: ShardSpec) -> nn.Parameter:
        """Create and register the parameter that `spec` describes."""
        param = self.tp.new_parameter(spec)
        self.register_parameter(attribute, param)
        self.specs[attribute] = spec
        return param

    def accumulate_rowwise(self, param: nn.Parameter, contribution: Tensor) -> None:
        """Add a finished gradient (bias, norm weight) to its main gradient now."""
        self.tp.grads.add(param, lambda buffer: buffer.add_(contribution))
