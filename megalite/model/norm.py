"""Norms whose gradients go to the chunk's gradient store, alone or with the residual add.

Shapes: T tokens (this rank's shard t under sequence parallelism), D model, H head dim; k groups of
g query heads, a key and a value. Each rank norms the tokens it holds, so under sequence parallelism
the parameters' gradients are partial sums over tp; those of `HeadNorm` always are, for each rank
norms its own heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.context import ShardedModule, TensorParallel


class RMSNorm(ShardedModule):
    """y = x / sqrt(mean(x^2) + eps) * weight."""

    bias: nn.Parameter | None

    def __init__(self, tp: TensorParallel, name: str, hidden_size: int, eps: float) -> None:
        super().__init__(tp)
        self.eps = eps
        self.weight = self.add_parameter("weight", self._spec(f"{name}.weight", hidden_size))
        self.register_parameter("bias", None)

    def _spec(self, name: str, hidden_size: int) -> ShardSpec:
        return ShardSpec(name, (hidden_size,), partial=self.tp.sequence_parallel, decay=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return _Norm.apply(x_TD, self.weight, self.bias, self)

    def add(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, norm of it): the residual stream is rounded to its dtype before the norm."""
        return _AddNorm.apply(x_TD, delta_TD, self.weight, self.bias, self)

    def compute(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> tuple[Tensor, ...]:
        """y, s = x + residual, and statistics: `backward_norm` finds (s, weight, *statistics)."""
        return self.tp.ops.rms_norm(x_TD, self.weight, self.eps, residual_TD)

    def backward_norm(self, ctx: Any, dy_TD: Tensor, ds_TD: Tensor | None = None) -> Tensor:
        """The gradient of x and residual; ds: what reaches s past the norm."""
        s_TD, weight, rstd_T1 = ctx.saved_tensors
        dx_TD, dweight_D = self.tp.ops.rms_norm_grad(dy_TD, s_TD, weight, rstd_T1, ds_TD)
        self.accumulate_rowwise(self.weight, dweight_D)
        return dx_TD


class LayerNorm(RMSNorm):
    """y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias."""

    def __init__(self, tp: TensorParallel, name: str, hidden_size: int, eps: float) -> None:
        super().__init__(tp, name, hidden_size, eps)
        self.bias: nn.Parameter = self.add_parameter(
            "bias", self._spec(f"{name}.bias", hidden_size)
        )

    def compute(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> tuple[Tensor, ...]:
        return self.tp.ops.layer_norm(x_TD, self.weight, self.bias, self.eps, residual_TD)

    def backward_norm(self, ctx: Any, dy_TD: Tensor, ds_TD: Tensor | None = None) -> Tensor:
        s_TD, weight, mean_T1, rstd_T1 = ctx.saved_tensors
        dx_TD, dweight_D, dbias_D = self.tp.ops.layer_norm_grad(
            dy_TD, s_TD, weight, mean_T1, rstd_T1, ds_TD
        )
        self.accumulate_rowwise(self.weight, dweight_D)
        self.accumulate_rowwise(self.bias, dbias_D)
        return dx_TD


_NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def make_norm(tp: TensorParallel, name: str, config: ModelConfig) -> RMSNorm:
    """The norm that the config names, over the hidden size."""
    return _NORMS[config.norm](tp, name, config.hidden_size, config.norm_eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight: Tensor, bias: Tensor | None, layer: RMSNorm
    ) -> Tensor:
        y_TD, _, *stats = layer.compute(x_TD)
        ctx.save_for_backward(x_TD, weight, *stats)
        ctx.layer = layer
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.layer.backward_norm(ctx, dy_TD), None, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        delta_TD: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: RMSNorm,
    ) -> tuple[Tensor, Tensor]:
        y_TD, sum_TD, *stats = layer.compute(x_TD, delta_TD)
        ctx.save_for_backward(sum_TD, weight, *stats)
        ctx.layer = layer
        return sum_TD, y_TD

    @staticmethod
    def backward(
        ctx: Any, dsum_TD: Tensor, dy_TD: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        dx_TD = ctx.layer.backward_norm(ctx, dy_TD, dsum_TD)
        return dx_TD, dx_TD, None, None, None


class HeadNorm(ShardedModule):
    """RMSNorm over each query head and each key head of packed heads [T, k, g + 2, H].

    One weight for all query heads, one for all key heads; values pass through.
    """

    def __init__(self, tp: TensorParallel, name: str, head_dim: int, eps: float) -> None:
        super().__init__(tp)
        self.eps = eps
        self.q_weight, self.k_weight = (
            self.add_parameter(
                f"{head}_weight",
                ShardSpec(f"{name}.{head}_norm.weight", (head_dim,), partial=True, decay=False),
            )
            for head in ("q", "k")
        )

    def forward(self, qkv_TkgH: Tensor) -> Tensor:
        return _HeadNorm.apply(qkv_TkgH, self.q_weight, self.k_weight, self)


class _HeadNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TkgH: Tensor, q_weight: Tensor, k_weight: Tensor, layer: HeadNorm
    ) -> Tensor:
        y_TkgH, rstd = layer.tp.ops.head_norm(qkv_TkgH, q_weight, k_weight, layer.eps)
        ctx.save_for_backward(qkv_TkgH, q_weight, k_weight, rstd)
        ctx.layer = layer
        return y_TkgH

    @staticmethod
    def backward(ctx: Any, dy_TkgH: Tensor) -> tuple[Tensor, None, None, None]:
        layer: HeadNorm = ctx.layer
        dqkv, dq_weight, dk_weight = layer.tp.ops.head_norm_grad(dy_TkgH, *ctx.saved_tensors)
        layer.accumulate_rowwise(layer.q_weight, dq_weight)
        layer.accumulate_rowwise(layer.k_weight, dk_weight)
        return dqkv, None, None, None
