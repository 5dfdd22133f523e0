"""RMSNorm whose weight gradient goes to the chunk's gradient store, alone or with the residual add.

Shapes: T tokens (this rank's shard t under sequence parallelism), D model. Each rank norms the
tokens it holds, so under sequence parallelism the weight's gradient is a partial sum over tp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite import kernels
from megalite.sharding import ShardSpec
from megalite.tensor_parallel.context import ShardedModule, TensorParallel


class RMSNorm(ShardedModule):
    """y = x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, tp: TensorParallel, name: str, hidden_size: int, eps: float) -> None:
        super().__init__(tp)
        self.eps = eps
        spec = ShardSpec(
            f"{name}.weight", (hidden_size,), partial=tp.sequence_parallel, decay=False
        )
        self.weight = self.add_parameter("weight", spec)

    def forward(self, x_TD: Tensor) -> Tensor:
        return _Norm.apply(x_TD, self.weight, self)

    def add(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, norm of it): the residual stream is rounded to its dtype before the norm."""
        return _AddNorm.apply(x_TD, delta_TD, self.weight, self)

    def backward_norm(self, ctx: Any, dy_TD: Tensor) -> Tensor:
        x_TD, weight, rstd_T1 = ctx.saved_tensors
        dx_TD, dweight_D = kernels.rms_norm_grad(dy_TD, x_TD, weight, rstd_T1)
        self.accumulate_rowwise(self.weight, dweight_D)
        return dx_TD


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight: Tensor, layer: RMSNorm) -> Tensor:
        y_TD, rstd_T1 = kernels.rms_norm(x_TD, weight, layer.eps)
        ctx.save_for_backward(x_TD, weight, rstd_T1)
        ctx.layer = layer
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layer.backward_norm(ctx, dy_TD), None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, delta_TD: Tensor, weight: Tensor, layer: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        sum_TD = x_TD + delta_TD
        y_TD, rstd_T1 = kernels.rms_norm(sum_TD, weight, layer.eps)
        ctx.save_for_backward(sum_TD, weight, rstd_T1)
        ctx.layer = layer
        return sum_TD, y_TD

    @staticmethod
    def backward(ctx: Any, dsum_TD: Tensor, dy_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx_TD = ctx.layer.backward_norm(ctx, dy_TD).add_(dsum_TD)
        return dx_TD, dx_TD, None, None
