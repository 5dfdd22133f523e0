"""Gradients of the custom operators: the tensors that each keeps, and its backward operator.

`_keep_NAME` saves the tensors of a call of NAME, `_NAME` is its backward. Importing this module
registers them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megalite.kernels.arguments import rows_readable
from megalite.kernels.operators import (
    attention as library_attention,
)
from megalite.kernels.operators import (
    loss as library_loss,
)
from megalite.kernels.operators import (
    norm as library_norm,
)
from megalite.kernels.operators import (
    pointwise as library_pointwise,
)

Grads = tuple[Tensor | None, ...]


def _cast(grad: Tensor, like: Tensor) -> Tensor:
    return grad.to(like.dtype)


def _keep_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _rms_norm(ctx: Any, dy: Tensor, _drstd: Tensor) -> Grads:
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = library_norm.rms_norm_grad(rows_readable(dy), x, weight, rstd, None)
    return dx, _cast(dweight, weight), None


def _keep_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, s, rstd = output
    ctx.save_for_backward(s, inputs[2], rstd)


def _add_rms_norm(ctx: Any, dy: Tensor, ds: Tensor, _drstd: Tensor) -> Grads:
    s, weight, rstd = ctx.saved_tensors
    dy, ds = rows_readable(dy), rows_readable(ds)
    dx, dweight = library_norm.rms_norm_grad(dy, s, weight, rstd, ds)
    return dx, dx.clone(), _cast(dweight, weight), None


def _keep_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])


def _layer_norm(ctx: Any, dy: Tensor, _dmean: Tensor, _drstd: Tensor) -> Grads:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    dy = rows_readable(dy)
    dx, dweight, dbias = library_norm.layer_norm_grad(dy, x, weight, mean, rstd, None)
    return dx, _cast(dweight, weight), _cast(dbias, bias), None


def _keep_add_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, s, mean, rstd = output
    ctx.save_for_backward(s, inputs[2], inputs[3], mean, rstd)


def _add_layer_norm(ctx: Any, dy: Tensor, ds: Tensor, _dmean: Tensor, _drstd: Tensor) -> Grads:
    s, weight, bias, mean, rstd = ctx.saved_tensors
    dy, ds = rows_readable(dy), rows_readable(ds)
    dx, dweight, dbias = library_norm.layer_norm_grad(dy, s, weight, mean, rstd, ds)
    return dx, dx.clone(), _cast(dweight, weight), _cast(dbias, bias), None


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.others = tuple(x for x in inputs if not isinstance(x, Tensor))


def _swiglu(ctx: Any, da: Tensor) -> Tensor:
    (h,) = ctx.saved_tensors
    return library_pointwise.swiglu_grad(rows_readable(da), h)


def _keep_bias_gelu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, bias, ctx.erf = inputs
    ctx.save_for_backward(h, bias)


def _bias_gelu(ctx: Any, da: Tensor) -> Grads:
    h, bias = ctx.saved_tensors
    dh, dbias = library_pointwise.bias_gelu_grad(rows_readable(da), h, bias, ctx.erf)
    return dh, None if bias is None else _cast(dbias, bias), None


def _keep_rope(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, position, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, position)


def _rope(ctx: Any, dy: Tensor) -> Grads:
    cos, sin, position = ctx.saved_tensors
    dx = library_pointwise.rope(rows_readable(dy), cos, sin, position, not ctx.inverse)
    return dx, None, None, None, None


def _keep_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.counters = inputs[1:]


def _dropout(ctx: Any, dy: Tensor) -> Grads:
    return library_pointwise.dropout(rows_readable(dy), *ctx.counters), None, None, None, None


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:7])
    ctx.scale = inputs[7]
    ctx.mark_non_differentiable(output[1])


def _attention(ctx: Any, do: Tensor, _dlse: Tensor) -> Grads:
    q, k, v, o, lse, lo, up, key_lo, key_up = ctx.saved_tensors
    grads = library_attention.attention_grad(do, q, k, v, o, lse, lo, up, key_lo, key_up, ctx.scale)
    return *grads, None, None, None, None, None


def _keep_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, label, weight, *ctx.options = inputs
    ctx.save_for_backward(logits, label, output[1], weight)
    ctx.mark_non_differentiable(output[1])


def _cross_entropy(ctx: Any, dloss: Tensor, _dlse: Tensor) -> Grads:
    logits, label, lse, weight = ctx.saved_tensors
    dlogits = library_loss.cross_entropy_grad(logits, label, lse, dloss, weight, *ctx.options)
    return dlogits, None, None, None, None, None, None


def _keep_linear_cross_entropy(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    x, matrix, label, weight, *ctx.options = inputs
    ctx.save_for_backward(x, matrix, label, output[1], weight)
    ctx.mark_non_differentiable(output[1])


def _linear_cross_entropy(ctx: Any, dloss: Tensor, _dlse: Tensor) -> Grads:
    x, matrix, label, lse, weight = ctx.saved_tensors
    ignore_index, z_loss, smoothing, vocab_size, chunk_tokens = ctx.options
    wanted = ctx.needs_input_grad[1]
    dx, dmatrix = library_loss.linear_cross_entropy_grad(
        x, matrix, label, lse, dloss, weight,
        ignore_index, z_loss, smoothing, vocab_size, chunk_tokens, wanted,
    )  # fmt: skip
    return dx, _cast(dmatrix, matrix) if wanted else None, None, None, None, None, None, None, None


library_norm.rms_norm.register_autograd(_rms_norm, setup_context=_keep_rms_norm)
library_norm.add_rms_norm.register_autograd(_add_rms_norm, setup_context=_keep_add_rms_norm)
library_norm.layer_norm.register_autograd(_layer_norm, setup_context=_keep_layer_norm)
library_norm.add_layer_norm.register_autograd(_add_layer_norm, setup_context=_keep_add_layer_norm)
library_pointwise.swiglu.register_autograd(_swiglu, setup_context=_keep_inputs)
library_pointwise.bias_gelu.register_autograd(_bias_gelu, setup_context=_keep_bias_gelu)
library_pointwise.rope.register_autograd(_rope, setup_context=_keep_rope)
library_pointwise.dropout.register_autograd(_dropout, setup_context=_keep_dropout)
library_attention.attention.register_autograd(_attention, setup_context=_keep_attention)
library_loss.cross_entropy.register_autograd(_cross_entropy, setup_context=_keep_cross_entropy)
library_loss.linear_cross_entropy.register_autograd(
    _linear_cross_entropy, setup_context=_keep_linear_cross_entropy
)
