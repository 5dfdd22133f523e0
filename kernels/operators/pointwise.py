"""Activations, rotation and dropout as custom operators; shapes as in `plain.products`.

An operator must not write into its arguments, so a gradient that overwrites h is given a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.kernels.operators.checks import check_indices
from megalite.kernels.operators.common import new_stats, operator, ops_of


@operator("megalite::swiglu")
def swiglu(h_T2f: Tensor) -> Tensor:
    """a[T, f] = silu(h[:, :f]) * h[:, f:]."""
    return ops_of(h_T2f).swiglu(h_T2f)


@swiglu.register_fake
def _(h_T2f: Tensor) -> Tensor:
    return h_T2f.new_empty(len(h_T2f), h_T2f.shape[1] // 2)


@operator("megalite::swiglu_grad")
def swiglu_grad(da_Tf: Tensor, h_T2f: Tensor) -> Tensor:
    """dh[T, 2f]."""
    return ops_of(h_T2f).swiglu_grad(da_Tf, h_T2f.clone())[0]


@swiglu_grad.register_fake
def _(da_Tf: Tensor, h_T2f: Tensor) -> Tensor:
    return torch.empty_like(h_T2f)


@operator("megalite::bias_gelu")
def bias_gelu(h_Tf: Tensor, bias_f: Tensor | None, erf: bool) -> Tensor:
    """a[T, f] = gelu(h + bias)."""
    return ops_of(h_Tf).gelu(h_Tf, bias_f, erf=erf)


@bias_gelu.register_fake
def _(h_Tf: Tensor, bias_f: Tensor | None, erf: bool) -> Tensor:
    return h_Tf.new_empty(h_Tf.shape)


@operator("megalite::bias_gelu_grad")
def bias_gelu_grad(
    da_Tf: Tensor, h_Tf: Tensor, bias_f: Tensor | None, erf: bool
) -> tuple[Tensor, Tensor]:
    """(dh[T, f], dbias[f]); dbias has no elements without a bias."""
    dh_Tf, _, dbias_f = ops_of(h_Tf).gelu_grad(da_Tf, h_Tf.clone(), False, bias_f, erf=erf)
    return dh_Tf, new_stats(h_Tf, 0) if dbias_f is None else dbias_f


@bias_gelu_grad.register_fake
def _(da_Tf: Tensor, h_Tf: Tensor, bias_f: Tensor | None, erf: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h_Tf), new_stats(h_Tf, 0 if bias_f is None else h_Tf.shape[1])


@operator("megalite::rope")
def rope(
    x_TNH: Tensor, cos_sh: Tensor, sin_sh: Tensor, position_T: Tensor | None, inverse: bool
) -> Tensor:
    """x[T, N, H] with every head rotated by its token's position, or rotated back."""
    if position_T is not None:
        check_indices("rope", "position", position_T, len(cos_sh))
    return ops_of(x_TNH).rotate_heads(x_TNH, cos_sh, sin_sh, position_T, inverse=inverse)


@rope.register_fake
def _(
    x_TNH: Tensor, cos_sh: Tensor, sin_sh: Tensor, position_T: Tensor | None, inverse: bool
) -> Tensor:
    return x_TNH.new_empty(x_TNH.shape)


@operator("megalite::dropout")
def dropout(x_TD: Tensor, key0: int, key1: int, p: float, first_token: int) -> Tensor:
    """x / (1 - p) where kept, 0 elsewhere; row t is token first_token + t."""
    return ops_of(x_TD).dropout(x_TD, (key0, key1), p, first_token)[0]


@dropout.register_fake
def _(x_TD: Tensor, key0: int, key1: int, p: float, first_token: int) -> Tensor:
    return x_TD.new_empty(x_TD.shape)
