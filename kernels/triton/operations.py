"""The operations on Triton kernels. What has none here (dense products) is torch's own.

Only `dispatch` imports this module, for it imports triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megalite.kernels.arguments import rows_readable
from megalite.kernels.errors import BackendError
from megalite.kernels.operations import Kernels
from megalite.kernels.plain.dropout import AttentionDropout, Key
from megalite.kernels.plain.intervals import Intervals, check_documents, document_intervals
from megalite.kernels.triton import (
    adamw as triton_adamw,
)
from megalite.kernels.triton import (
    attention as triton_attention,
)
from megalite.kernels.triton import (
    attention_backward as triton_attention_backward,
)
from megalite.kernels.triton import (
    cast as triton_cast,
)
from megalite.kernels.triton import (
    cross_entropy as triton_cross_entropy,
)
from megalite.kernels.triton import (
    dropout as triton_dropout,
)
from megalite.kernels.triton import (
    gelu as triton_gelu,
)
from megalite.kernels.triton import (
    grouped_gemm as triton_grouped_gemm,
)
from megalite.kernels.triton import (
    moe_permute as triton_moe_permute,
)
from megalite.kernels.triton import (
    norm as triton_norm,
)
from megalite.kernels.triton import (
    swiglu as triton_swiglu,
)
from megalite.kernels.triton.adamw_plan import TritonAdamW
from megalite.kernels.triton.attention_tiles import HEAD_DIMS, Drop
from megalite.kernels.triton.rope import rope_


def _summed(partial_PD: Tensor) -> Tensor:
    """The column sum of a kernel's partial rows, always in the same order."""
    return triton_norm.column_sum(partial_PD, partial_PD.new_empty(partial_PD.shape[1]))


class TritonKernels(TritonAdamW, Kernels):
    """Every operation that has a Triton kernel by it."""

    uses_tables = True

    def __init__(self, name: str = "triton") -> None:
        self.name = name

    def check_model(self, head_dim: int, hidden_size: int) -> None:
        if head_dim not in HEAD_DIMS and "attention" not in vars(self):  # an adapter's otherwise
            raise BackendError(
                f"the triton attention has no kernel for a head dim of {head_dim}; it takes "
                f"{', '.join(map(str, HEAD_DIMS))}; change the model, or set "
                "kernels.attention=sdpa_flash or kernels.backend=reference"
            )
        if hidden_size > triton_norm.MAX_COLUMNS:
            raise BackendError(
                f"the triton norms take up to {triton_norm.MAX_COLUMNS} columns, model.hidden_size "
                f"is {hidden_size}; change it, or set kernels.backend=reference"
            )

    def rms_norm(
        self, x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, s, _, rstd_T = triton_norm.norm_forward(x_TD, weight_D, eps, residual_TD=residual_TD)
        return y, s, rstd_T.unsqueeze(1)

    def rms_norm_grad(
        self,
        dy_TD: Tensor,
        s_TD: Tensor,
        weight_D: Tensor,
        rstd_T1: Tensor,
        ds_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        dx, partial, _ = triton_norm.norm_backward(
            dy_TD, s_TD, weight_D, rstd_T1.flatten(), ds_TD=ds_TD
        )
        return dx, _summed(partial)

    def layer_norm(
        self,
        x_TD: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        eps: float,
        residual_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, s, mean_T, rstd_T = triton_norm.norm_forward(
            x_TD, weight_D, eps, residual_TD=residual_TD, bias_D=bias_D, center=True
        )
        assert mean_T is not None, "LayerNorm has a mean"
        return y, s, mean_T.unsqueeze(1), rstd_T.unsqueeze(1)

    def layer_norm_grad(
        self,
        dy_TD: Tensor,
        s_TD: Tensor,
        weight_D: Tensor,
        mean_T1: Tensor,
        rstd_T1: Tensor,
        ds_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx, partial, partial_bias = triton_norm.norm_backward(
            dy_TD,
            s_TD,
            weight_D,
            rstd_T1.flatten(),
            mean_T=mean_T1.flatten(),
            ds_TD=ds_TD,
            with_bias=True,
        )
        assert partial_bias is not None, "asked for"
        return dx, _summed(partial), _summed(partial_bias)

    def head_norm(
        self, qkv_TkgH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, rstds = torch.empty_like(qkv_TkgH), []
        for heads, weight in _head_slices(qkv_TkgH, q_weight_H, k_weight_H):
            x = qkv_TkgH[:, :, heads]
            normed, _, _, rstd = triton_norm.norm_forward(x.flatten(0, 2), weight, eps)
            y[:, :, heads] = normed.view(x.shape)
            rstds.append(rstd.view(x.shape[:3]))
        y[:, :, -1] = qkv_TkgH[:, :, -1]
        return y, torch.cat(rstds, 2)

    def head_norm_grad(
        self,
        dy_TkgH: Tensor,
        qkv_TkgH: Tensor,
        q_weight_H: Tensor,
        k_weight_H: Tensor,
        rstd: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dqkv, dweights = torch.empty_like(dy_TkgH), []
        for heads, weight in _head_slices(qkv_TkgH, q_weight_H, k_weight_H):
            dy, x = dy_TkgH[:, :, heads], qkv_TkgH[:, :, heads]
            dx, partial, _ = triton_norm.norm_backward(
                dy.flatten(0, 2), x.flatten(0, 2), weight, rstd[:, :, heads].flatten()
            )
            dqkv[:, :, heads] = dx.view(x.shape)
            dweights.append(_summed(partial))
        dqkv[:, :, -1] = dy_TkgH[:, :, -1]
        return dqkv, dweights[0], dweights[1]

    def swiglu(self, h_T2f: Tensor) -> Tensor:
        return triton_swiglu.swiglu_forward(h_T2f)

    def swiglu_grad(
        self, da_Tf: Tensor, h_T2f: Tensor, recompute: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        a_Tf = triton_swiglu.swiglu_backward_(h_T2f, da_Tf, recompute)
        increment_version(h_T2f)  # a second backward through the same graph is told of it
        return h_T2f, a_Tf

    def gelu(self, h_Tf: Tensor) -> Tensor:
        return triton_gelu.gelu_forward(h_Tf)

    def gelu_grad(
        self, da_Tf: Tensor, h_Tf: Tensor, recompute: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        a_Tf = triton_gelu.gelu_forward(h_Tf) if recompute else None
        triton_gelu.gelu_backward_(h_Tf, da_Tf)
        increment_version(h_Tf)
        return h_Tf, a_Tf

    def bias_gelu(self, h_Tf: Tensor, bias_f: Tensor | None, *, erf: bool = False) -> Tensor:
        return triton_gelu.gelu_forward(h_Tf, bias_f, erf=erf)

    def bias_gelu_grad(
        self, da_Tf: Tensor, h_Tf: Tensor, bias_f: Tensor | None, *, erf: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        partial = triton_gelu.gelu_backward_(h_Tf, da_Tf, bias_f, erf=erf)
        increment_version(h_Tf)
        return h_Tf, None if partial is None else _summed(partial)

    def turn(
        self,
        x_TNH: Tensor,
        cos_sh: Tensor,
        sin_sh: Tensor,
        position_T: Tensor | None = None,
        *,
        inverse: bool = False,
    ) -> Tensor:
        out = torch.empty_like(x_TNH, memory_format=torch.contiguous_format)
        x_T1NH, out_T1NH = rows_readable(x_TNH).unsqueeze(1), out.unsqueeze(1)
        rope_(x_T1NH, cos_sh, sin_sh, position_T, inverse=inverse, out=out_T1NH)
        return out

    def rotate(
        self, qkv_TkgH: Tensor, cos_sh: Tensor, sin_sh: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries = qkv_TkgH.shape[2] - 2
        parts = qkv_TkgH[:, :, :queries], qkv_TkgH[:, :, queries : queries + 1]
        q, k = (
            rope_(x, cos_sh, sin_sh, out=torch.empty_like(x, memory_format=torch.contiguous_format))
            for x in parts
        )
        return q, k, qkv_TkgH[:, :, queries + 1 :]

    def rotate_grad_(
        self,
        dqkv_TkgH: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        cos_sh: Tensor,
        sin_sh: Tensor,
    ) -> None:
        queries = dqkv_TkgH.shape[2] - 2
        for dx, heads in ((dq, slice(queries)), (dk, slice(queries, queries + 1))):
            rope_(rows_readable(dx), cos_sh, sin_sh, inverse=True, out=dqkv_TkgH[:, :, heads])
        dqkv_TkgH[:, :, queries + 1 :] = dv

    def attention_mask(
        self, cu_seqlens: Sequence[int], window: int | None, device: torch.device
    ) -> Any:
        check_documents(cu_seqlens, window)
        bounds = torch.tensor(cu_seqlens, dtype=torch.int64).to(device, non_blocking=True)
        return document_intervals(bounds, cu_seqlens[-1], window=window)

    def attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        mask: Any,
        drop: AttentionDropout | None = None,
    ) -> Tensor:
        return _Attention.apply(q_TNH, k_TKH, v_TKH, mask, drop)

    def interval_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Intervals, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        return triton_attention.attention_forward(q, k, v, mask, scale=scale)

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
        stats = triton_attention.attention_delta(o, do, lse)
        return triton_attention_backward.attention_backward(do, q, k, v, stats, mask, scale=scale)

    def dropout(
        self, x_TD: Tensor, key: Key, p: float, first_token: int
    ) -> tuple[Tensor, Tensor | None]:
        return triton_dropout.dropout(x_TD, key, p, first_token), None

    expert_rows = staticmethod(triton_moe_permute.expert_rows)
    permute = staticmethod(triton_moe_permute.permute)
    permute_grad = staticmethod(triton_moe_permute.permute_grad)
    unpermute = staticmethod(triton_moe_permute.unpermute)
    unpermute_grad = staticmethod(triton_moe_permute.unpermute_grad)
    grouped_linear = staticmethod(triton_grouped_gemm.grouped_linear)
    grouped_linear_input_grad = staticmethod(triton_grouped_gemm.grouped_linear_input_grad)
    grouped_weight_grad_ = staticmethod(triton_grouped_gemm.grouped_weight_grad_)

    adamw_ = staticmethod(triton_adamw.adamw_)

    @staticmethod
    def scale_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        return triton_cast.scale_cast(x, torch.empty_like(x, dtype=dtype), scale)

    cross_entropy_stats = staticmethod(triton_cross_entropy.cross_entropy_stats)
    cross_entropy_combine = staticmethod(triton_cross_entropy.cross_entropy_combine)

    @staticmethod
    def cross_entropy_grad_(logits_Tv: Tensor, *args: Any, **options: Any) -> Tensor:
        increment_version(logits_Tv)
        return triton_cross_entropy.cross_entropy_grad_(logits_Tv, *args, **options)


class _Attention(torch.autograd.Function):
    """q[T, N, H], k and v [T, K, H] -> o[T, N, H]; keeps inputs, output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Intervals, drop: AttentionDropout | None
    ) -> Tensor:
        dropped = None if drop is None else _drop(drop)
        o, lse = triton_attention.attention_forward(q, k, v, mask, drop=dropped)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mask, ctx.drop = mask, dropped
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        if torch.is_grad_enabled():  # as create_graph=True has it
            raise RuntimeError(
                "attention: its gradient has none of its own, so that it would go missing in "
                "silence; leave out create_graph, or set kernels.backend=reference"
            )
        q, k, v, o, lse = ctx.saved_tensors
        stats = triton_attention.attention_delta(o, do, lse)
        dq, dk, dv = triton_attention_backward.attention_backward(
            do, q, k, v, stats, ctx.mask, drop=ctx.drop
        )
        return dq, dk, dv, None, None


def _drop(drop: AttentionDropout) -> Drop:
    return Drop(drop.p, drop.key, drop.first_token, drop.first_token, drop.first_head)


def _head_slices(
    qkv_TkgH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor
) -> list[tuple[slice, Tensor]]:
    queries = qkv_TkgH.shape[2] - 2
    return [(slice(queries), q_weight_H), (slice(queries, queries + 1), k_weight_H)]
