"""The operations on Triton kernels. Operations without one here (dense products) are torch's.

Only `dispatch` imports this module, since it imports triton.
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
from megalite.kernels.plain.loss import IGNORE_INDEX
from megalite.kernels.triton import (
    adamw,
    attention,
    attention_backward,
    cast,
    cross_entropy,
    dropout,
    gelu,
    grouped_gemm,
    moe_permute,
    norm,
    swiglu,
)
from megalite.kernels.triton.adamw_plan import TritonAdamW
from megalite.kernels.triton.attention_tiles import HEAD_DIMS, Drop
from megalite.kernels.triton.rope import rotate_heads_


def _summed(partial_PD: Tensor) -> Tensor:
    """The column sum of a kernel's partial rows, always in the same order."""
    return norm.column_sum(partial_PD, partial_PD.new_empty(partial_PD.shape[1]))


class TritonAttention:
    """`AttentionOperations` in Triton."""

    def attention_mask(
        self, cu_seqlens: Sequence[int], window: int | None, device: torch.device
    ) -> Intervals:
        """The mask as intervals on the device. Raises ValueError."""
        check_documents(cu_seqlens, window)
        bounds = torch.tensor(cu_seqlens, dtype=torch.int64).to(device, non_blocking=True)
        return document_intervals(bounds, cu_seqlens[-1], window=window)

    def attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        mask: Intervals,
        drop: AttentionDropout | None = None,
    ) -> Tensor:
        """Attention by `triton.attention` and, in the backward, `triton.attention_backward`.

        Raises RuntimeError in a backward with create_graph.
        """
        o_TNH: Tensor = _Attention.apply(q_TNH, k_TKH, v_TKH, mask, drop)
        return o_TNH


class TritonRMSNorm:
    """`RMSNormOperations` in Triton."""

    def rms_norm(
        self, x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `RMSNormOperations`."""
        y, s, _, rstd_T = norm.norm_forward(x_TD, weight_D, eps, residual_TD=residual_TD)
        return y, s, rstd_T.unsqueeze(1)

    def rms_norm_grad(
        self,
        dy_TD: Tensor,
        s_TD: Tensor,
        weight_D: Tensor,
        rstd_T1: Tensor,
        ds_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `RMSNormOperations`."""
        dx, partial, _ = norm.norm_backward(dy_TD, s_TD, weight_D, rstd_T1.flatten(), ds_TD=ds_TD)
        return dx, _summed(partial)


class TritonKernels(Kernels):
    """Every operation that has a Triton kernel, by that kernel; the others in plain torch.

    name: "triton", or "interpret" in Triton's interpreter.
    """

    uses_tables = True

    def __init__(self, name: str = "triton") -> None:
        super().__init__()
        self.name = name
        self.attention_operations = TritonAttention()
        self.rms_norm_operations = TritonRMSNorm()
        self.adamw_operations = TritonAdamW()

    def check_model(self, head_dim: int, hidden_size: int) -> None:
        # Attention of another package checks its own head dims when it is called.
        own_attention = isinstance(self.attention_operations, TritonAttention)
        if own_attention and head_dim not in HEAD_DIMS:
            raise BackendError(
                f"the triton attention has no kernel for a head dim of {head_dim}; it takes "
                f"{', '.join(map(str, HEAD_DIMS))}; change the model, or set "
                "kernels.attention=sdpa_flash or kernels.backend=reference"
            )
        if hidden_size > norm.MAX_COLUMNS:
            raise BackendError(
                f"the triton norms take up to {norm.MAX_COLUMNS} columns, model.hidden_size "
                f"is {hidden_size}; change it, or set kernels.backend=reference"
            )

    def layer_norm(
        self,
        x_TD: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        eps: float,
        residual_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, s, mean_T, rstd_T = norm.norm_forward(
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
        dx, partial, partial_bias = norm.norm_backward(
            dy_TD,
            s_TD,
            weight_D,
            rstd_T1.flatten(),
            mean_T=mean_T1.flatten(),
            ds_TD=ds_TD,
            with_bias=True,
        )
        assert partial_bias is not None, "with_bias gives it"
        return dx, _summed(partial), _summed(partial_bias)

    def head_norm(
        self, qkv_TkgH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, rstds = torch.empty_like(qkv_TkgH), []
        for heads, weight in _head_slices(qkv_TkgH, q_weight_H, k_weight_H):
            x = qkv_TkgH[:, :, heads]
            normed, _, _, rstd = norm.norm_forward(x.flatten(0, 2), weight, eps)
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
            dx, partial, _ = norm.norm_backward(
                dy.flatten(0, 2), x.flatten(0, 2), weight, rstd[:, :, heads].flatten()
            )
            dqkv[:, :, heads] = dx.view(x.shape)
            dweights.append(_summed(partial))
        dqkv[:, :, -1] = dy_TkgH[:, :, -1]
        return dqkv, dweights[0], dweights[1]

    def swiglu(self, h_T2f: Tensor) -> Tensor:
        return swiglu.swiglu_forward(h_T2f)

    def swiglu_grad(
        self, da_Tf: Tensor, h_T2f: Tensor, recompute: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        a_Tf = swiglu.swiglu_backward_(h_T2f, da_Tf, recompute)
        increment_version(h_T2f)  # makes autograd refuse a second backward through the same graph
        return h_T2f, a_Tf

    def gelu(self, h_Tf: Tensor) -> Tensor:
        return gelu.gelu_forward(h_Tf)

    def gelu_grad(
        self, da_Tf: Tensor, h_Tf: Tensor, recompute: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        a_Tf = gelu.gelu_forward(h_Tf) if recompute else None
        gelu.gelu_backward_(h_Tf, da_Tf)
        increment_version(h_Tf)
        return h_Tf, a_Tf

    def bias_gelu(self, h_Tf: Tensor, bias_f: Tensor | None, *, erf: bool = False) -> Tensor:
        return gelu.gelu_forward(h_Tf, bias_f, erf=erf)

    def bias_gelu_grad(
        self, da_Tf: Tensor, h_Tf: Tensor, bias_f: Tensor | None, *, erf: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        partial = gelu.gelu_backward_(h_Tf, da_Tf, bias_f, erf=erf)
        increment_version(h_Tf)
        return h_Tf, None if partial is None else _summed(partial)

    def rotate_heads(
        self,
        x_TNH: Tensor,
        cos_sh: Tensor,
        sin_sh: Tensor,
        position_T: Tensor | None = None,
        *,
        inverse: bool = False,
    ) -> Tensor:
        out = torch.empty_like(x_TNH, memory_format=torch.contiguous_format)
        # the kernel takes heads in groups; here all are one group
        x_T1NH, out_T1NH = rows_readable(x_TNH).unsqueeze(1), out.unsqueeze(1)
        rotate_heads_(x_T1NH, cos_sh, sin_sh, position_T, inverse=inverse, out=out_T1NH)
        return out

    def rotate(
        self, qkv_TkgH: Tensor, cos_sh: Tensor, sin_sh: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries = qkv_TkgH.shape[2] - 2
        q, k = qkv_TkgH[:, :, :queries], qkv_TkgH[:, :, queries : queries + 1]
        q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
        rotate_heads_(q, cos_sh, sin_sh, out=q_out)
        rotate_heads_(k, cos_sh, sin_sh, out=k_out)
        return q_out, k_out, qkv_TkgH[:, :, queries + 1 :]

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
            out = dqkv_TkgH[:, :, heads]
            rotate_heads_(rows_readable(dx), cos_sh, sin_sh, inverse=True, out=out)
        dqkv_TkgH[:, :, queries + 1 :] = dv

    def interval_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Intervals, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        return attention.attention_forward(q, k, v, mask, scale=scale)

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
        stats = attention.attention_delta(o, do, lse)
        return attention_backward.attention_backward(do, q, k, v, stats, mask, scale=scale)

    def dropout(
        self, x_TD: Tensor, key: Key, p: float, first_token: int
    ) -> tuple[Tensor, Tensor | None]:
        return dropout.dropout(x_TD, key, p, first_token), None

    expert_rows = staticmethod(moe_permute.expert_rows)
    permute = staticmethod(moe_permute.permute)
    permute_grad = staticmethod(moe_permute.permute_grad)
    unpermute = staticmethod(moe_permute.unpermute)
    unpermute_grad = staticmethod(moe_permute.unpermute_grad)
    grouped_linear = staticmethod(grouped_gemm.grouped_linear)
    grouped_linear_input_grad = staticmethod(grouped_gemm.grouped_linear_input_grad)
    grouped_weight_grad_ = staticmethod(grouped_gemm.grouped_weight_grad_)

    adamw_ = staticmethod(adamw.adamw_)

    @staticmethod
    def scale_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        return cast.scale_cast(x, torch.empty_like(x, dtype=dtype), scale)

    cross_entropy_stats = staticmethod(cross_entropy.cross_entropy_stats)
    cross_entropy_combine = staticmethod(cross_entropy.cross_entropy_combine)

    @staticmethod
    def cross_entropy_grad_(
        logits_Tv: Tensor,
        label_T: Tensor,
        lse_T: Tensor,
        dloss_T: Tensor,
        first_column: int,
        num_columns: int,
        *,
        weight_T: Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        z_loss: float = 0.0,
        smoothing: float = 0.0,
        vocab_size: int | None = None,
    ) -> Tensor:
        increment_version(logits_Tv)
        return cross_entropy.cross_entropy_grad_(
            logits_Tv, label_T, lse_T, dloss_T, first_column, num_columns, weight_T=weight_T,
            ignore_index=ignore_index, z_loss=z_loss, smoothing=smoothing, vocab_size=vocab_size,
        )  # fmt: skip


class _Attention(torch.autograd.Function):
    """q[T, N, H], k and v [T, K, H] -> o[T, N, H]; keeps inputs, output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Intervals, drop: AttentionDropout | None
    ) -> Tensor:
        dropped = None if drop is None else _drop(drop)
        o, lse = attention.attention_forward(q, k, v, mask, drop=dropped)
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
        stats = attention.attention_delta(o, do, lse)
        dq, dk, dv = attention_backward.attention_backward(
            do, q, k, v, stats, ctx.mask, drop=ctx.drop
        )
        return dq, dk, dv, None, None


def _drop(drop: AttentionDropout) -> Drop:
    """The dropout of a call whose queries and keys are the same tokens."""
    return Drop(drop.p, drop.key, drop.first_token, drop.first_token, drop.first_head)


def _head_slices(
    qkv_TkgH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor
) -> list[tuple[slice, Tensor]]:
    """The query heads and the key head of a group, each with its weight."""
    queries = qkv_TkgH.shape[2] - 2
    return [(slice(queries), q_weight_H), (slice(queries, queries + 1), k_weight_H)]
