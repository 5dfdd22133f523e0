"""Norms whose gradients go to the chunk's gradient store, alone or with the residual add.

Shapes: T tokens (this rank's shard t under sequence parallelism), D model, H head dim; k groups of
g query heads, a key and a value. Each rank norms the tokens it holds, so under sequence parallelism
the parameters' gradients are partial sums over tp; those of `HeadNorm` always are, for each rank
norms its own heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.context import LayerContext, ShardedModule

Specs = Mapping[str, ShardSpec]  # the specs of a chunk, by name


class RMSNorm(ShardedModule):
    """y = x / sqrt(mean(x^2) + eps) * weight."""

    bias: nn.Parameter | None

    def __init__(
        self, context: LayerContext, eps: float, weight: ShardSpec, bias: ShardSpec | None = None
    ) -> None:
        super().__init__(context)
        self.eps = eps
        self.weight = self.add_parameter("weight", weight)
        self.bias = self.add_optional_parameter("bias", bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        return _Norm.apply(x_TD, self.weight, self.bias, self)

    def add(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, norm of it): the residual stream is rounded to its dtype before the norm."""
        return _AddNorm.apply(x_TD, delta_TD, self.weight, self.bias, self)

    def compute(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> tuple[Tensor, ...]:
        """y, s = x + residual, and statistics: `backward_norm` finds (s, weight, *statistics)."""
        return self.context.ops.rms_norm(x_TD, self.weight, self.eps, residual_TD)

    def backward_norm(self, ctx: Any, dy_TD: Tensor, ds_TD: Tensor | None = None) -> Tensor:
        """The gradient of x and residual; ds: the part of s's gradient that bypasses the norm."""
        s_TD, weight, rstd_T1 = ctx.saved_tensors
        dx_TD, dweight_D = self.context.ops.rms_norm_grad(dy_TD, s_TD, weight, rstd_T1, ds_TD)
        self.accumulate_rowwise(self.weight, dweight_D)
        return dx_TD


class LayerNorm(RMSNorm):
    """y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias."""

    def compute(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> tuple[Tensor, ...]:
        assert self.bias is not None, "LayerNorm has a bias"
        return self.context.ops.layer_norm(x_TD, self.weight, self.bias, self.eps, residual_TD)

    def backward_norm(self, ctx: Any, dy_TD: Tensor, ds_TD: Tensor | None = None) -> Tensor:
        s_TD, weight, mean_T1, rstd_T1 = ctx.saved_tensors
        dx_TD, dweight_D, dbias_D = self.context.ops.layer_norm_grad(
            dy_TD, s_TD, weight, mean_T1, rstd_T1, ds_TD
        )
        self.accumulate_rowwise(self.weight, dweight_D)
        assert self.bias is not None, "LayerNorm has a bias"
        self.accumulate_rowwise(self.bias, dbias_D)
        return dx_TD


_NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def make_norm(context: LayerContext, specs: Specs, name: str, config: ModelConfig) -> RMSNorm:
    """The norm that the config names, over the hidden size."""
    weight, bias = specs[f"{name}.weight"], specs.get(f"{name}.bias")
    return _NORMS[config.norm](context, config.norm_eps, weight, bias)


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

    def __init__(self, context: LayerContext, eps: float, q: ShardSpec, k: ShardSpec) -> None:
        super().__init__(context)
        self.eps = eps
        self.q_weight = self.add_parameter("q_weight", q)
        self.k_weight = self.add_parameter("k_weight", k)

    def forward(self, qkv_TkgH: Tensor) -> Tensor:
        return _HeadNorm.apply(qkv_TkgH, self.q_weight, self.k_weight, self)


class _HeadNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TkgH: Tensor, q_weight: Tensor, k_weight: Tensor, layer: HeadNorm
    ) -> Tensor:
        y_TkgH, rstd = layer.context.ops.head_norm(qkv_TkgH, q_weight, k_weight, layer.eps)
        ctx.save_for_backward(qkv_TkgH, q_weight, k_weight, rstd)
        ctx.layer = layer
        return y_TkgH

    @staticmethod
    def backward(ctx: Any, dy_TkgH: Tensor) -> tuple[Tensor, None, None, None]:
        layer: HeadNorm = ctx.layer
        dqkv, dq_weight, dk_weight = layer.context.ops.head_norm_grad(dy_TkgH, *ctx.saved_tensors)
        layer.accumulate_rowwise(layer.q_weight, dq_weight)
        layer.accumulate_rowwise(layer.k_weight, dk_weight)
        return dqkv, None, None, None
