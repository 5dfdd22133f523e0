"""Column- and row-parallel linear layers (Megatron-LM, arXiv 1909.08053; sequence parallelism,
arXiv 2205.05198), each one autograd Function.

Shapes: T tokens, D input, F output features; t = T / tp tokens, d and f = this rank's shard.
With tp = 1 the same lines run and no collective does anything. Weight gradients go to the chunk's
`GradStore`, never to `.grad`.

    column   forward: all-gather t -> T (sequence parallel), then x_TD @ W_fD^T
             backward: dx_TD is all-reduced, or reduce-scattered to dx_tD, while dW is computed
    row      forward: x_Tf @ W_Df^T is all-reduced, or reduce-scattered to y_tD
             backward: dy all-gathered t -> T (sequence parallel), then dx and dW
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import Activation
from megalite.distributed import comm
from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.context import LayerContext, ShardedModule


class ColumnParallelLinear(ShardedModule):
    """y[T, f] = x @ W[f, D]^T + b[f]: output features are split over tp.

    spec: of the weight; the last dim of its global shape is D, the product of the others F, one of
    which tp cuts. A bias is cut like the weight. x is [T, D], or [t, D] under sequence parallelism.
    weight: a parameter that another layer of this chunk owns (a tied embedding), in place of one of
    its own.
    """

    def __init__(
        self,
        context: LayerContext,
        spec: ShardSpec | None = None,
        bias: ShardSpec | None = None,
        *,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__(context)
        assert (spec is None) != (weight is None), "a layer has one weight, its own or another's"
        if weight is not None:
            self.weight = weight
        elif spec is not None:
            self.weight = self.add_parameter("weight", spec)
        self.bias = self.add_optional_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return _ColumnLinear.apply(x, self.weight, self.bias, self)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ColumnParallelLinear
    ) -> Tensor:
        context = layer.context
        x_TD = comm.all_gather(x, context.tp) if context.sequence_parallel else x
        bias_f = None if bias is None else bias.flatten()
        y_Tf = context.ops.linear(x_TD, weight.flatten(0, -2), bias_f)
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return y_Tf

    @staticmethod
    def backward(ctx: Any, dy_Tf: Tensor) -> tuple[Tensor | None, None, None, None]:
        layer: ColumnParallelLinear = ctx.layer
        context, (x, weight) = layer.context, ctx.saved_tensors
        weight_fD = weight.flatten(0, -2)
        scatter = context.sequence_parallel
        # In flight during the two products: the gather during dx, dx's reduction during dW.
        gather = comm.start_all_gather(x, context.tp) if scatter else None
        reduction = None
        if ctx.needs_input_grad[0]:
            reduce = comm.start_reduce_scatter if scatter else comm.start_all_reduce
            dx_TD = context.ops.linear_input_grad(dy_Tf, weight_fD)
            reduction = reduce(dx_TD, context.tp)
            if not context.overlap:
                reduction.wait()
        x_TD = x if gather is None else gather.wait()
        add_linear_grads(layer, layer.weight, layer.bias, dy_Tf, x_TD)
        return (None if reduction is None else reduction.wait()), None, None, None


class RowParallelLinear(ShardedModule):
    """y = sum over tp of a[T, f] @ W[D, f]^T, plus b[D]: input features are split over tp.

    Returns [T, D], or [t, D] under sequence parallelism, where each rank adds the whole bias to
    its own tokens. With an `activation`, the input is h and a = activation(h) is part of the layer
    (h is [T, 2f] with a gate); `keep_activation=False` recomputes it in the backward (same bits).
    """

    def __init__(
        self,
        context: LayerContext,
        spec: ShardSpec,
        bias: ShardSpec | None = None,
        *,
        activation: Activation | None = None,
        keep_activation: bool = True,
    ) -> None:
        super().__init__(context)
        # The function that is applied to the input, and its gradient.
        ops = context.ops
        activations = {
            None: (None, None),
            "swiglu": (ops.swiglu, ops.swiglu_grad),
            "geglu": (partial(ops.geglu, erf=True), partial(ops.geglu_grad, erf=True)),
            "geglu_tanh": (ops.geglu, ops.geglu_grad),
            "gelu": (partial(ops.gelu, erf=True), partial(ops.gelu_grad, erf=True)),
            "gelu_tanh": (ops.gelu, ops.gelu_grad),
            "relu2": (ops.relu2, ops.relu2_grad),
        }
        self.activate, self.activate_grad = activations[activation]
        self.keep_activation = keep_activation
        self.weight = self.add_parameter("weight", spec)
        self.bias = self.add_optional_parameter("bias", bias)

    def forward(self, h: Tensor) -> Tensor:
        return _RowLinear.apply(h, self.weight, self.bias, self)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, layer: RowParallelLinear
    ) -> Tensor:
        context = layer.context
        a_Tf = layer.activate(h) if layer.activate else h
        y_TD = context.ops.linear(a_Tf, weight)
        reduce = comm.reduce_scatter if context.sequence_parallel else comm.all_reduce
        y = reduce(y_TD, context.tp)
        if bias is not None:
            y += bias
        keep = layer.activate and layer.keep_activation
        ctx.save_for_backward(h, weight, *([a_Tf] if keep else []))
        ctx.layer = layer
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        layer: RowParallelLinear = ctx.layer
        context, (h, weight, *kept) = layer.context, ctx.saved_tensors
        if layer.bias is not None:
            layer.accumulate_rowwise(layer.bias, context.ops.bias_grad(dy))
        dy_TD = comm.all_gather(dy, context.tp) if context.sequence_parallel else dy
        dh, a_Tf = None, kept[0] if kept else None
        if ctx.needs_input_grad[0]:
            dh = context.ops.linear_input_grad(dy_TD, weight)
            if layer.activate_grad:
                # It may be written over h, so an activation that was not kept is made again here.
                dh, again_Tf, *_ = layer.activate_grad(dh, h, recompute=not kept)
                a_Tf = again_Tf if a_Tf is None else a_Tf
        if a_Tf is None:
            a_Tf = layer.activate(h) if layer.activate else h
        add_linear_grads(layer, layer.weight, None, dy_TD, a_Tf)
        return dh, None, None, None


def add_linear_grads(
    layer: ShardedModule, weight: nn.Parameter, bias: nn.Parameter | None, dy_TF: Tensor, x: Tensor
) -> None:
    """Hand dW = dy^T x (deferrable) and db = sum_T dy to the layer's gradient store."""
    if bias is not None:
        layer.accumulate_rowwise(bias, layer.context.ops.bias_grad(dy_TF))
    dy_TF, x = dy_TF.detach(), x.detach()
    ops = layer.context.ops
    layer.context.grads.add(
        weight,
        lambda buffer: ops.accumulate_weight_grad_(buffer.flatten(0, -2), dy_TF, x),
        deferrable=True,
    )
