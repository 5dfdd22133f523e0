"""The operations as one object: model, loss and optimizer call it and choose no backend.

`Kernels` is the reference path in plain torch, on any device; `TritonKernels` replaces the
operations that have a Triton kernel. Both take and return the same: shapes as in `plain.products`,
storage types in and out, float32 in between. Functions whose name ends in `_` write into their
first argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.kernels.adamw_operations import AdamWOperations, AdamWPlan, AdamWRun, AdamWSettings
from megalite.kernels.plain import (
    activations,
    attention,
    dropout,
    interval_attention,
    loss,
    moe,
    norms,
    processor_products,
    products,
    rope,
)
from megalite.kernels.plain.adamw import ReferenceAdamW
from megalite.kernels.plain.dropout import AttentionDropout, Key
from megalite.kernels.plain.intervals import Intervals, check_documents


@dataclass(frozen=True)
class DocumentMask:
    """Causal attention within documents [cu[i], cu[i + 1]), at most `window` tokens back."""

    cu_seqlens: Sequence[int]
    window: int | None = None


class AttentionOperations(Protocol):
    """Attention of packed documents, and the mask that it takes."""

    def attention_mask(
        self, cu_seqlens: Sequence[int], window: int | None, device: torch.device
    ) -> Any:
        """The mask for `attention`, the same one for all layers of a microbatch.

        cu_seqlens: document boundaries [0, ..., T]. Raises ValueError.
        """
        ...

    def attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        mask: Any,
        drop: AttentionDropout | None = None,
    ) -> Tensor:
        """out[T, N, H], differentiable by autograd; causal within the mask's documents."""
        ...


class RMSNormOperations(Protocol):
    """RMSNorm of a sum, and its gradient."""

    def rms_norm(
        self, x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(y[T, D], s[T, D], rstd[T, 1]) of s = x + residual, rounded before the norm."""
        ...

    def rms_norm_grad(
        self,
        dy_TD: Tensor,
        s_TD: Tensor,
        weight_D: Tensor,
        rstd_T1: Tensor,
        ds_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(dx[T, D], dweight[D]); ds: the gradient that reaches s past the norm, added to dx."""
        ...


class ReferenceAttention:
    """`AttentionOperations` in plain torch."""

    def attention_mask(
        self, cu_seqlens: Sequence[int], window: int | None, device: torch.device
    ) -> DocumentMask:
        """The boundaries and the window, checked. Raises ValueError."""
        check_documents(cu_seqlens, window)
        return DocumentMask(cu_seqlens, window)

    def attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        mask: DocumentMask,
        drop: AttentionDropout | None = None,
    ) -> Tensor:
        """`plain.attention.attention`."""
        return attention.attention(q_TNH, k_TKH, v_TKH, mask.cu_seqlens, mask.window, drop)


class ReferenceRMSNorm:
    """`RMSNormOperations` in plain torch."""

    def rms_norm(
        self, x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`plain.norms.rms_norm` of the sum."""
        s_TD = x_TD if residual_TD is None else x_TD + residual_TD
        y_TD, rstd_T1 = norms.rms_norm(s_TD, weight_D, eps)
        return y_TD, s_TD, rstd_T1

    def rms_norm_grad(
        self,
        dy_TD: Tensor,
        s_TD: Tensor,
        weight_D: Tensor,
        rstd_T1: Tensor,
        ds_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`plain.norms.rms_norm_grad`, plus ds."""
        dx_TD, dweight_D = norms.rms_norm_grad(dy_TD, s_TD, weight_D, rstd_T1)
        return dx_TD if ds_TD is None else dx_TD.add_(ds_TD), dweight_D


class Kernels:
    """Every operation in plain torch.

    Attention, RMSNorm and AdamW are called through the objects that `attention_operations`,
    `rms_norm_operations` and `adamw_operations` hold: those of another package may take the place
    of this class's (`adapted.with_adapters`).
    """

    name = "reference"
    uses_tables = False  # True if a committed table gives the launch options of each kernel

    def __init__(self) -> None:
        self.attention_operations: AttentionOperations = ReferenceAttention()
        self.rms_norm_operations: RMSNormOperations = ReferenceRMSNorm()
        self.adamw_operations: AdamWOperations = ReferenceAdamW()

    def check_model(self, head_dim: int, hidden_size: int) -> None:
        """Raise BackendError for a model of a shape that the operations do not take."""

    def adamw_plan(self, runs: Sequence[AdamWRun], settings: AdamWSettings) -> AdamWPlan:
        """The plan that updates `runs` in place in every step."""
        return self.adamw_operations.adamw_plan(runs, settings)

    def square_sums(self, xs: Sequence[Tensor], device: torch.device) -> Tensor:
        """Sum of squares over all of some contiguous 1-D tensors of `device`: 0-d float64."""
        return self.adamw_operations.square_sums(xs, device)

    linear = staticmethod(processor_products.linear)
    linear_input_grad = staticmethod(processor_products.linear_input_grad)
    accumulate_weight_grad_ = staticmethod(processor_products.accumulate_weight_grad_)
    bias_grad = staticmethod(products.bias_grad)
    embedding_grad_ = staticmethod(products.embedding_grad_)

    def rms_norm(
        self, x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(y[T, D], s[T, D], rstd[T, 1]) of s = x + residual, rounded before the norm."""
        return self.rms_norm_operations.rms_norm(x_TD, weight_D, eps, residual_TD)

    def rms_norm_grad(
        self,
        dy_TD: Tensor,
        s_TD: Tensor,
        weight_D: Tensor,
        rstd_T1: Tensor,
        ds_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(dx[T, D], dweight[D]); ds: the gradient that reaches s past the norm, added to dx."""
        return self.rms_norm_operations.rms_norm_grad(dy_TD, s_TD, weight_D, rstd_T1, ds_TD)

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
        y_TD, mean_T1, rstd_T1 = norms.layer_norm(s_TD, weight_D, bias_D, eps)
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
        dx_TD, dweight_D, dbias_D = norms.layer_norm_grad(dy_TD, s_TD, weight_D, mean_T1, rstd_T1)
        return dx_TD if ds_TD is None else dx_TD.add_(ds_TD), dweight_D, dbias_D

    def head_norm(
        self, qkv_TkgH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(y[T, k, g + 2, H], rstd): RMSNorm of each query head and key head; values are copied."""
        queries = qkv_TkgH.shape[2] - 2
        normed, rstd = norms.rms_norm(
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
        dx, dweight = norms.rms_norm_grad(
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
        return activations.swiglu(h_T2f)

    def swiglu_grad(
        self, da_Tf: Tensor, h_T2f: Tensor, recompute: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(dh[T, 2f] in the memory of h, a[T, f] if `recompute` or None)."""
        a_Tf = activations.swiglu(h_T2f) if recompute else None
        return activations.swiglu_grad(da_Tf, h_T2f, out=h_T2f), a_Tf

    def gelu(self, h_Tf: Tensor) -> Tensor:
        """a[T, f] = gelu(h), tanh form."""
        return activations.gelu(h_Tf)

    def gelu_grad(
        self, da_Tf: Tensor, h_Tf: Tensor, recompute: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(dh[T, f] in the memory of h, a[T, f] if `recompute` or None)."""
        a_Tf = activations.gelu(h_Tf) if recompute else None
        return activations.gelu_grad(da_Tf, h_Tf, out=h_Tf), a_Tf

    def bias_gelu(self, h_Tf: Tensor, bias_f: Tensor | None, *, erf: bool = False) -> Tensor:
        """a[T, f] = gelu(h + bias) in the tanh or the erf form."""
        return activations.bias_gelu(h_Tf, bias_f, erf=erf)

    def bias_gelu_grad(
        self, da_Tf: Tensor, h_Tf: Tensor, bias_f: Tensor | None, *, erf: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(dh[T, f] in the memory of h, dbias[f] or None)."""
        return activations.bias_gelu_grad(da_Tf, h_Tf, bias_f, erf=erf, out=h_Tf)

    def rotate_heads(
        self,
        x_TNH: Tensor,
        cos_sh: Tensor,
        sin_sh: Tensor,
        position_T: Tensor | None = None,
        *,
        inverse: bool = False,
    ) -> Tensor:
        """x[T, N, H] with every head rotated by its token's position, or back; a new tensor."""
        return rope.rotate_heads(x_TNH, cos_sh, sin_sh, position_T, inverse=inverse)

    def rotate(
        self, qkv_TkgH: Tensor, cos_sh: Tensor, sin_sh: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k, v) of packed heads, q and k rotated by their position: `plain.rope.rotate`."""
        return rope.rotate(qkv_TkgH, cos_sh, sin_sh)

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
        rope.rotate_grad_(dqkv_TkgH, dq, dk, dv, cos_sh, sin_sh)

    def attention_mask(
        self, cu_seqlens: Sequence[int], window: int | None, device: torch.device
    ) -> Any:
        """The mask for `attention`, the same one for all layers of a microbatch.

        cu_seqlens: document boundaries [0, ..., T]. Raises ValueError.
        """
        return self.attention_operations.attention_mask(cu_seqlens, window, device)

    def attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        mask: Any,
        drop: AttentionDropout | None = None,
    ) -> Tensor:
        """out[T, N, H], differentiable by autograd; causal within the mask's documents."""
        return self.attention_operations.attention(q_TNH, k_TKH, v_TKH, mask, drop)

    def interval_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Intervals, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """(o[T, N, H], lse[N, T]) under an interval mask; no autograd."""
        return interval_attention.interval_attention(q, k, v, mask, scale)

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
        return interval_attention.interval_attention_grad(do, q, k, v, o, lse, mask, scale)

    def dropout(
        self, x_TD: Tensor, key: Key, p: float, first_token: int
    ) -> tuple[Tensor, Tensor | None]:
        """(x / (1 - p) where kept, the mask for `dropout_grad` or None); row t: first_token + t."""
        token = torch.arange(first_token, first_token + len(x_TD), device=x_TD.device)
        column = torch.arange(x_TD.shape[1], device=x_TD.device)
        keep_TD = dropout.dropout_mask(key, p, token.unsqueeze(1), column)
        return dropout.dropout(x_TD, keep_TD, p), keep_TD

    def dropout_grad(
        self, dy_TD: Tensor, key: Key, p: float, first_token: int, keep_TD: Tensor | None
    ) -> Tensor:
        """dx[T, D] of `dropout`."""
        if keep_TD is None:
            return self.dropout(dy_TD, key, p, first_token)[0]
        return dropout.dropout(dy_TD, keep_TD, p)

    expert_rows = staticmethod(moe.expert_rows)
    permute = staticmethod(moe.permute)
    permute_grad = staticmethod(moe.permute_grad)
    unpermute = staticmethod(moe.unpermute)
    unpermute_grad = staticmethod(moe.unpermute_grad)
    grouped_linear = staticmethod(moe.grouped_linear)
    grouped_linear_input_grad = staticmethod(moe.grouped_linear_input_grad)
    grouped_weight_grad_ = staticmethod(moe.grouped_weight_grad_)

    adamw_ = staticmethod(products.adamw_)
    scale_cast = staticmethod(products.scale_cast)
    cross_entropy_stats = staticmethod(loss.cross_entropy_stats)
    cross_entropy_combine = staticmethod(loss.cross_entropy_combine)
    cross_entropy_grad_ = staticmethod(loss.cross_entropy_grad_)


def _head_rows(q_weight_H: Tensor, k_weight_H: Tensor, queries: int) -> Tensor:
    """The weight of each head of a group but its value: [g + 1, H]."""
    return torch.cat([q_weight_H.expand(queries, -1), k_weight_H.unsqueeze(0)])
