"""Norms as custom operators; shapes as in `plain.products`."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.kernels.operators.common import new_stats, operator, ops_of


@operator("megalite::rms_norm")
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y[T, D], rstd[T, 1])."""
    y_TD, _, _, rstd_T1 = ops_of(x_TD).norm(x_TD, weight_D, None, eps)
    return y_TD, rstd_T1


@rms_norm.register_fake
def _(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape), new_stats(x_TD, len(x_TD), 1)


@operator("megalite::add_rms_norm")
def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y[T, D], s[T, D], rstd[T, 1]) of s = x + residual."""
    y_TD, s_TD, _, rstd_T1 = ops_of(x_TD).norm(x_TD, weight_D, None, eps, residual_TD)
    return y_TD, s_TD, rstd_T1


@add_rms_norm.register_fake
def _(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y_TD = x_TD.new_empty(x_TD.shape)
    return y_TD, torch.empty_like(y_TD), new_stats(x_TD, len(x_TD), 1)


@operator("megalite::rms_norm_grad")
def rms_norm_grad(
    dy_TD: Tensor, s_TD: Tensor, weight_D: Tensor, rstd_T1: Tensor, ds_TD: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(dx[T, D], dweight[D])."""
    return ops_of(s_TD).norm_grad(dy_TD, s_TD, weight_D, None, rstd_T1, ds_TD)[:2]


@rms_norm_grad.register_fake
def _(
    dy_TD: Tensor, s_TD: Tensor, weight_D: Tensor, rstd_T1: Tensor, ds_TD: Tensor | None
) -> tuple[Tensor, Tensor]:
    return s_TD.new_empty(s_TD.shape), new_stats(s_TD, s_TD.shape[1])


@operator("megalite::layer_norm")
def layer_norm(
    x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y[T, D], mean[T, 1], rstd[T, 1])."""
    y_TD, _, mean_T1, rstd_T1 = ops_of(x_TD).norm(x_TD, weight_D, bias_D, eps)
    assert mean_T1 is not None
    return y_TD, mean_T1, rstd_T1


@layer_norm.register_fake
def _(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    tokens = len(x_TD)
    return x_TD.new_empty(x_TD.shape), new_stats(x_TD, tokens, 1), new_stats(x_TD, tokens, 1)


@operator("megalite::add_layer_norm")
def add_layer_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y[T, D], s[T, D], mean[T, 1], rstd[T, 1]) of s = x + residual."""
    y_TD, s_TD, mean_T1, rstd_T1 = ops_of(x_TD).norm(x_TD, weight_D, bias_D, eps, residual_TD)
    assert mean_T1 is not None
    return y_TD, s_TD, mean_T1, rstd_T1


@add_layer_norm.register_fake
def _(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y_TD, tokens = x_TD.new_empty(x_TD.shape), len(x_TD)
    return y_TD, torch.empty_like(y_TD), new_stats(x_TD, tokens, 1), new_stats(x_TD, tokens, 1)


@operator("megalite::layer_norm_grad")
def layer_norm_grad(
    dy_TD: Tensor,
    s_TD: Tensor,
    weight_D: Tensor,
    mean_T1: Tensor,
    rstd_T1: Tensor,
    ds_TD: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx[T, D], dweight[D], dbias[D])."""
    found = ops_of(s_TD).norm_grad(dy_TD, s_TD, weight_D, mean_T1, rstd_T1, ds_TD)
    dx_TD, dweight_D, dbias_D = found
    assert dbias_D is not None
    return dx_TD, dweight_D, dbias_D


@layer_norm_grad.register_fake
def _(
    dy_TD: Tensor,
    s_TD: Tensor,
    weight_D: Tensor,
    mean_T1: Tensor,
    rstd_T1: Tensor,
    ds_TD: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    columns = s_TD.shape[1]
    return s_TD.new_empty(s_TD.shape), new_stats(s_TD, columns), new_stats(s_TD, columns)
