"""Norms whose gradients go to the chunk's gradient store, with the addition to the residual stream.

Shapes: T tokens (this rank's shard t under sequence parallelism), D model, H head dim; k groups of
g query heads, a key and a value. Each rank norms the tokens it holds, so under sequence parallelism
the parameters' gradients are partial sums over tp; those of `HeadNorm` always are, for each rank
norms its own heads. `ProjectionNorm` is over the heads of all ranks, which sum their squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.distributed import comm
from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.context import LayerContext, ShardedModule

Specs = Mapping[str, ShardSpec]  # the specs of a chunk, by name


class Norm(ShardedModule):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight); with a bias LayerNorm.

    LayerNorm takes x - mean(x) for x, and adds the bias. The offset is the config's, 0 or 1.
    """

    def __init__(
        self,
        context: LayerContext,
        config: ModelConfig,
        weight: ShardSpec,
        bias: ShardSpec | None = None,
    ) -> None:
        super().__init__(context)
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.weight = self.add_parameter("weight", weight)
        self.bias = self.add_optional_parameter("bias", bias)

    def forward(self, x_TD: Tensor, delta_TD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(s, norm of s) of s = x + delta, rounded to its dtype before the norm; without delta x.

        The residual stream goes on as s, so that its gradient is added in the norm's own backward.
        """
        return _Norm.apply(x_TD, delta_TD, self.weight, self.bias, self)


def make_norm(context: LayerContext, specs: Specs, name: str, config: ModelConfig) -> Norm:
    """The norm that the config names, over the hidden size: LayerNorm is the one with a bias."""
    return Norm(context, config, specs[f"{name}.weight"], specs.get(f"{name}.bias"))


def optional_norm(
    context: LayerContext, specs: Specs, name: str, config: ModelConfig
) -> Norm | None:
    """`make_norm`, or None where the model's list has no such norm."""
    return make_norm(context, specs, name, config) if f"{name}.weight" in specs else None


class _Norm(torch.autograd.Function):
    """(s, y) of s = x + delta or x, whose gradients reach x and delta alike."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        layer: Norm,
    ) -> tuple[Tensor, Tensor]:
        y_TD, s_TD, *stats = layer.context.ops.norm(
            x_TD, weight, bias, layer.eps, delta_TD, offset=layer.offset
        )
        ctx.save_for_backward(s_TD, weight, *stats)
        ctx.set_materialize_grads(False)  # no gradient reaches the s of a model's last norm
        ctx.layer = layer
        return s_TD, y_TD

    @staticmethod
    def backward(ctx: Any, ds_TD: Tensor | None, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        layer: Norm = ctx.layer
        dx_TD, dweight_PD, dbias_PD = layer.context.ops.norm_grad(
            dy_TD, *ctx.saved_tensors, ds_TD, offset=layer.offset
        )
        layer.accumulate_rowwise(layer.weight, dweight_PD)
        if layer.bias is not None and dbias_PD is not None:
            layer.accumulate_rowwise(layer.bias, dbias_PD)
        return dx_TD, dx_TD if ctx.needs_input_grad[1] else None, None, None, None


class HeadNorm(ShardedModule):
    """RMSNorm over each query head and each key head of packed heads [T, k, g + 2, H].

    One weight for all query heads, one for all key heads; values pass through.
    """

    def __init__(
        self, context: LayerContext, config: ModelConfig, q: ShardSpec, k: ShardSpec
    ) -> None:
        super().__init__(context)
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.q_weight = self.add_parameter("q_weight", q)
        self.k_weight = self.add_parameter("k_weight", k)

    def forward(self, qkv_TkgH: Tensor) -> Tensor:
        return _HeadNorm.apply(qkv_TkgH, self.q_weight, self.k_weight, self)


class _HeadNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TkgH: Tensor, q_weight: Tensor, k_weight: Tensor, layer: HeadNorm
    ) -> Tensor:
        y_TkgH, rstd = layer.context.ops.head_norm(
            qkv_TkgH, q_weight, k_weight, layer.eps, offset=layer.offset
        )
        ctx.save_for_backward(qkv_TkgH, q_weight, k_weight, rstd)
        ctx.layer = layer
        return y_TkgH

    @staticmethod
    def backward(ctx: Any, dy_TkgH: Tensor) -> tuple[Tensor, None, None, None]:
        layer: HeadNorm = ctx.layer
        dqkv, dq_weight, dk_weight = layer.context.ops.head_norm_grad(
            dy_TkgH, *ctx.saved_tensors, offset=layer.offset
        )
        layer.accumulate_rowwise(layer.q_weight, dq_weight)
        layer.accumulate_rowwise(layer.k_weight, dk_weight)
        return dqkv, None, None, None


class ProjectionNorm(ShardedModule):
    """RMSNorm over all query heads of a token, and over all its key heads, of [T, k, g + 2, H].

    A weight for each element, [k, g, H] and [k, H], cut over tp as the heads are; each rank's sums
    of squares are added up over tp. Values pass through. In plain torch on every device.
    """

    def __init__(
        self, context: LayerContext, config: ModelConfig, q: ShardSpec, k: ShardSpec
    ) -> None:
        super().__init__(context)
        self.eps, self.offset = config.norm_eps, config.norm_offset
        self.q_weight = self.add_parameter("q_weight", q)
        self.k_weight = self.add_parameter("k_weight", k)
        self.sizes = (math.prod(q.shape), math.prod(k.shape))  # elements of all ranks

    def forward(self, qkv_TkgH: Tensor) -> Tensor:
        return _ProjectionNorm.apply(qkv_TkgH, self.q_weight, self.k_weight, self)

    def sums(self, q_TkgH: Tensor, k_TkgH: Tensor) -> list[Tensor]:
        """Means over all heads of all ranks, [T, 1, 1, 1] of each."""
        sums_2T = torch.stack([x.flatten(1).sum(1) for x in (q_TkgH, k_TkgH)])
        sums_2T = comm.all_reduce(sums_2T, self.context.tp)
        sizes = zip(sums_2T, self.sizes, strict=True)
        return [(sum_T / size).view(-1, 1, 1, 1) for sum_T, size in sizes]


class _ProjectionNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TkgH: Tensor, q_weight: Tensor, k_weight: Tensor, layer: ProjectionNorm
    ) -> Tensor:
        queries, y_TkgH = qkv_TkgH.shape[2] - 2, qkv_TkgH.clone()
        wide = torch.promote_types(qkv_TkgH.dtype, torch.float32)
        q, k, _ = qkv_TkgH.to(wide).split([queries, 1, 1], 2)
        means = layer.sums(q.square(), k.square())
        rstds = [mean.add_(layer.eps).rsqrt_() for mean in means]
        weights = _ProjectionNorm.weights(layer, wide)
        parts = y_TkgH.split([queries, 1, 1], 2)
        for part, x, rstd, weight in zip(parts[:2], (q, k), rstds, weights, strict=True):
            part.copy_(x * rstd * weight)
        ctx.save_for_backward(qkv_TkgH, *rstds)
        ctx.layer = layer
        return y_TkgH

    @staticmethod
    def backward(ctx: Any, dy_TkgH: Tensor) -> tuple[Tensor, None, None, None]:
        layer, (qkv_TkgH, *rstds) = ctx.layer, ctx.saved_tensors
        queries, wide = qkv_TkgH.shape[2] - 2, rstds[0].dtype
        split = [queries, 1, 1]
        weights = _ProjectionNorm.weights(layer, wide)
        params = (layer.q_weight, layer.k_weight)

        # With n = x * rstd and g = dy * weight: dx = rstd * (g - n * mean(g * n)), as in RMSNorm.
        q, k, _ = qkv_TkgH.to(wide).split(split, 2)
        normed = [x * rstd for x, rstd in zip((q, k), rstds, strict=True)]
        dys = dy_TkgH.to(wide).split(split, 2)[:2]
        for param, dy, n in zip(params, dys, normed, strict=True):
            layer.accumulate_rowwise(param, (dy * n).sum(0).view(param.shape))
        gs = [dy * weight for dy, weight in zip(dys, weights, strict=True)]
        means = layer.sums(*(g * n for g, n in zip(gs, normed, strict=True)))
        dqkv_TkgH = dy_TkgH.clone(memory_format=torch.contiguous_format)
        parts = dqkv_TkgH.split(split, 2)[:2]
        for part, g, n, mean, rstd in zip(parts, gs, normed, means, rstds, strict=True):
            part.copy_((g - n * mean) * rstd)
        return dqkv_TkgH, None, None, None

    @staticmethod
    def weights(layer: ProjectionNorm, dtype: torch.dtype) -> list[Tensor]:
        """The offset added to both weights, [k, g, H] and [k, 1, H]."""
        pair = (layer.q_weight, layer.k_weight.unsqueeze(1))
        return [weight.detach().to(dtype) + layer.offset for weight in pair]
