"""The operations as one object, so that whoever builds a model says once what computes them.

`Kernels` is the reference path in plain torch, on any device; `TritonKernels` replaces what has a
kernel. Both take and return the same: shapes as in `plain.products`, storage types in and out,
float32 in between. Functions whose name ends in `_` write into their first argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.plain import (
    activations as reference_activations,
)
from megalite.kernels.plain import (
    attention as reference_attention,
)
from megalite.kernels.plain import (
    dropout as reference_dropout,
)
from megalite.kernels.plain import (
    interval_attention as reference_intervals,
)
from megalite.kernels.plain import (
    loss as reference_loss,
)
from megalite.kernels.plain import (
    moe as reference_moe,
)
from megalite.kernels.plain import (
    norms as reference_norms,
)
from megalite.kernels.plain import (
    processor_products,
)
from megalite.kernels.plain import (
    products as reference,
)
from megalite.kernels.plain import (
    rope as reference_rope,
)
from megalite.kernels.plain.adamw import ReferenceAdamW
from megalite.kernels.plain.dropout import AttentionDropout, Key
from megalite.kernels.plain.intervals import Intervals, check_documents


@dataclass(frozen=True)
class DocumentMask:
    """Causal attention within documents [cu[i], cu[i + 1]), at most `window` tokens back."""

    cu_seqlens: Sequence[int]
    window: int | None = None


class Kernels(ReferenceAdamW):
    """Every operation in plain torch."""

    name = "reference"
    uses_tables = False  # whether a table says how each kernel is launched

    def check_model(self, head_dim: int, hidden_size: int) -> None:
        """Raise BackendError for a model of a shape that the operations do not take."""

    linear = staticmethod(processor_products.linear)
    linear_input_grad = staticmethod(processor_products.linear_input_grad)
    accumulate_weight_grad_ = staticmethod(processor_products.accumulate_weight_grad_)
    bias_grad = staticmethod(reference.bias_grad)
    embedding_grad_ = staticmethod(reference.embedding_grad_)

    def rms_norm(
        self, x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(y[T, D], s[T, D], rstd[T, 1]) of s = x + residual, rounded before the norm."""
        s_TD = x_TD if residual_TD is None else x_TD + residual_TD
        y_TD, rstd_T1 = reference_norms.rms_norm(s_TD, weight_D, eps)
        return y_TD, s_TD, rstd_T1

    def rms_norm_grad(
        self,
        dy_TD: Tensor,
        s_TD: Tensor,
        weight_D: Tensor,
        rstd_T1: Tensor,
        ds_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(dx[T, D], dweight[D]); ds: the gradient that reaches s past the norm, added to dx."""
        dx_TD, dweight_D = reference_norms.rms_norm_grad(dy_TD, s_TD, weight_D, rstd_T1)
        return dx_TD if ds_TD is None else dx_TD.add_(ds_TD), dweight_D

    def layer_norm(
        self,
        x_TD: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        eps: float,
        residual_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(y[T, D], s[T, D], mean[T, 1], rstd[T, 1]) of s = x + residual, rounded first."""
        s_TD = x_TD if residual_TD is None else x_TD + residual_TD
        y_TD, mean_T1, rstd_T1 = reference_norms.layer_norm(s_TD, weight_D, bias_D, eps)
        return y_TD, s_TD, mean_T1, rstd_T1

    def layer_norm_grad(
        self,
        dy_TD: Tensor,
        s_TD: Tensor,
        weight_D: Tensor,
        mean_T1: Tensor,
        rstd_T1: Tensor,
        ds_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dx[T, D], dweight[D], dbias[D]); ds as in `rms_norm_grad`."""
        dx_TD, dweight_D, dbias_D = reference_norms.layer_norm_grad(
            dy_TD, s_TD, weight_D, mean_T1, rstd_T1
        )
        return dx_TD if ds_TD is None else dx_TD.add_(ds_TD), dweight_D, dbias_D

    def head_norm(
        self, qkv_TkgH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(y[T, k, g + 2, H], rstd): RMSNorm of each query head and key head; values are copied."""
        queries = qkv_TkgH.shape[2] - 2
        normed, rstd = reference_norms.rms_norm(
            qkv_TkgH[:, :, : queries + 1], _head_rows(q_weight_H, k_weight_H, queries), eps
        )
        return torch.cat([normed, qkv_TkgH[:, :, queries + 1 :]], 2), rstd

    def head_norm_grad(
        self,
        dy_TkgH: Tensor,
        qkv_TkgH: Tensor,
        q_weight_H: Tensor,
        k_weight_H: Tensor,
        rstd: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dqkv[T, k, g + 2, H], dq_weight[H], dk_weight[H]) of `head_norm`."""
        queries = qkv_TkgH.shape[2] - 2
        heads = slice(queries + 1)
        dx, dweight = reference_norms.rms_norm_grad(
            dy_TkgH[:, :, heads],
            qkv_TkgH[:, :, heads],
            _head_rows(q_weight_H, k_weight_H, queries),
            rstd,
        )
        dweight_gH = dweight.sum(0)
        dqkv_TkgH = torch.cat([dx, dy_TkgH[:, :, queries + 1 :]], 2)
        return dqkv_TkgH, dweight_gH[:-1].sum(0), dweight_gH[-1]

    def swiglu(self, h_T2f: Tensor) -> Tensor:
        """a[T, f] = silu(h[:, :f]) * h[:, f:]."""
        return reference_activations.swiglu(h_T2f)

    def swiglu_grad(
        self, da_Tf: Tensor, h_T2f: Tensor, recompute: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(dh[T, 2f], written over h, and a[T, f] where `recompute`); so h serves once."""
        a_Tf = reference_activations.swiglu(h_T2f) if recompute else None
        return reference_activations.swiglu_grad(da_Tf, h_T2f, out=h_T2f), a_Tf

    def gelu(self, h_Tf: Tensor) -> Tensor:
        """a[T, f] = gelu(h), tanh form."""
        return reference_activations.gelu(h_Tf)

    def gelu_grad(
        self, da_Tf: Tensor, h_Tf: Tensor, recompute: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(dh[T, f], written over h, and a[T, f] where `recompute`); so h serves once."""
        a_Tf = reference_activations.gelu(h_Tf) if recompute else None
        return reference_activations.gelu_grad(da_Tf, h_Tf, out=h_Tf), a_Tf

    def bias_gelu(self, h_Tf: Tensor, bias_f: Tensor | None, *, erf: bool = False) -> Tensor:
        """a[T, f] = gelu(h + bias) in the tanh or the erf form."""
        return reference_activations.bias_gelu(h_Tf, bias_f, erf=erf)

    def bias_gelu_grad(
        self, da_Tf: Tensor, h_Tf: Tensor, bias_f: Tensor | None, *, erf: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(dh[T, f], written over h, and dbias[f] or None)."""
        return reference_activations.bias_gelu_grad(da_Tf, h_Tf, bias_f, erf=erf, out=h_Tf)

    def turn(
        self,
        x_TNH: Tensor,
        cos_sh: Tensor,
        sin_sh: Tensor,
        position_T: Tensor | None = None,
        *,
        inverse: bool = False,
    ) -> Tensor:
        """x[T, N, H] with every head rotated by its token's position, or back; a new tensor."""
        return reference_rope.turn(x_TNH, cos_sh, sin_sh, position_T, inverse=inverse)

    def rotate(
        self, qkv_TkgH: Tensor, cos_sh: Tensor, sin_sh: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k, v) of packed heads, q and k turned by their position: `plain.rope.rotate`."""
        return reference_rope.rotate(qkv_TkgH, cos_sh, sin_sh)

    def rotate_grad_(
        self,
        dqkv_TkgH: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        cos_sh: Tensor,
        sin_sh: Tensor,
    ) -> None:
        """Write the gradient of `rotate` into dqkv."""
        reference_rope.rotate_grad_(dqkv_TkgH, dq, dk, dv, cos_sh, sin_sh)

    def attention_mask(
        self, cu_seqlens: Sequence[int], window: int | None, device: torch.device
    ) -> Any:
        """What `attention` takes as its mask; good for all layers of a microbatch.

        cu_seqlens: document boundaries [0, ..., T]. Raises ValueError.
        """
        check_documents(cu_seqlens, window)
        return DocumentMask(cu_seqlens, window)

    def attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        mask: Any,
        drop: AttentionDropout | None = None,
    ) -> Tensor:
        """out[T, N, H], differentiable by autograd; causal within the mask's documents."""
        return reference_attention.attention(
            q_TNH, k_TKH, v_TKH, mask.cu_seqlens, mask.window, drop
        )

    def interval_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Intervals, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """(o[T, N, H], lse[N, T]) under an interval mask; no autograd."""
        return reference_intervals.interval_attention(q, k, v, mask, scale)

    def interval_attention_grad(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        mask: Intervals,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of `interval_attention`; o and lse of the whole softmax."""
        return reference_intervals.interval_attention_grad(do, q, k, v, o, lse, mask, scale)

    def dropout(
        self, x_TD: Tensor, key: Key, p: float, first_token: int
    ) -> tuple[Tensor, Tensor | None]:
        """(x / (1 - p) where kept, what `dropout_grad` wants kept); row t is first_token + t."""
        token = torch.arange(first_token, first_token + len(x_TD), device=x_TD.device)
        column = torch.arange(x_TD.shape[1], device=x_TD.device)
        keep_TD = reference_dropout.dropout_mask(key, p, token.unsqueeze(1), column)
        return reference_dropout.dropout(x_TD, keep_TD, p), keep_TD

    def dropout_grad(
        self, dy_TD: Tensor, key: Key, p: float, first_token: int, keep_TD: Tensor | None
    ) -> Tensor:
        """dx[T, D] of `dropout`."""
        if keep_TD is None:
            return self.dropout(dy_TD, key, p, first_token)[0]
        return reference_dropout.dropout(dy_TD, keep_TD, p)

    expert_rows = staticmethod(reference_moe.expert_rows)
    permute = staticmethod(reference_moe.permute)
    permute_grad = staticmethod(reference_moe.permute_grad)
    unpermute = staticmethod(reference_moe.unpermute)
    unpermute_grad = staticmethod(reference_moe.unpermute_grad)
    grouped_linear = staticmethod(reference_moe.grouped_linear)
    grouped_linear_input_grad = staticmethod(reference_moe.grouped_linear_input_grad)
    grouped_weight_grad_ = staticmethod(reference_moe.grouped_weight_grad_)

    adamw_ = staticmethod(reference.adamw_)
    scale_cast = staticmethod(reference.scale_cast)
    cross_entropy_stats = staticmethod(reference_loss.cross_entropy_stats)
    cross_entropy_combine = staticmethod(reference_loss.cross_entropy_combine)
    cross_entropy_grad_ = staticmethod(reference_loss.cross_entropy_grad_)


def _head_rows(q_weight_H: Tensor, k_weight_H: Tensor, queries: int) -> Tensor:
    """The weight of each head of a group but its value: [g + 1, H]."""
    return torch.cat([q_weight_H.expand(queries, -1), k_weight_H.unsqueeze(0)])
