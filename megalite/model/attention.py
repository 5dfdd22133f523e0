"""Self-attention: packed QKV projection, norm of heads, rotary positions, causal attention, output
projection.

Shapes: T tokens, D model, n = N / tp query heads, k = K / tp key/value heads of this rank,
g = N / K query heads per group, H head dim. The packed projection's global shape is
[K, g + 2, H, D]: a group holds its query heads, then its key, then its value, so that tensor
parallelism cuts whole groups and one matrix product makes all three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite import kernels
from megalite.config import ModelConfig
from megalite.model.norm import HeadNorm, ProjectionNorm, Specs
from megalite.model.sequence import Sequences
from megalite.tensor_parallel.context import LayerContext
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class SelfAttention(nn.Module):
    """Causal self-attention within documents, in the window and with the rotation of its layer.

    recompute_core: keep only the packed projection for the backward and run rotation and attention
    again, instead of keeping rotated heads, output and statistics.
    """

    def __init__(
        self,
        context: LayerContext,
        specs: Specs,
        name: str,
        config: ModelConfig,
        *,
        layer: int,
        recompute_core: bool,
    ) -> None:
        super().__init__()
        heads, groups, head_dim = config.num_heads, config.kv_heads, config.head_size
        tp, self.ops = context.tp, context.ops
        self.shape_kgH = (groups // tp.size, heads // groups + 2, head_dim)
        self.first_head = heads // tp.size * tp.rank  # dropout masks are drawn by global head
        self.recompute_core = recompute_core
        self.layer, self.kind = layer, config.kind_of(layer)
        self.dropout_p = config.attention_dropout
        self.scale = config.attention_multiplier

        # The packed projection is cut by groups, so that each rank has whole ones.
        qkv, out = f"{name}.qkv", f"{name}.out"
        self.qkv = ColumnParallelLinear(context, specs[f"{qkv}.weight"], specs.get(f"{qkv}.bias"))
        self.head_norm: HeadNorm | ProjectionNorm | None = None
        if config.qk_norm:
            q, k = specs[f"{name}.q_norm.weight"], specs[f"{name}.k_norm.weight"]
            norm = HeadNorm if config.qk_norm_over == "head" else ProjectionNorm
            self.head_norm = norm(context, config, q, k)
        self.out = RowParallelLinear(context, specs[f"{out}.weight"], specs.get(f"{out}.bias"))

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        qkv = self.qkv(x)
        qkv_TkgH = qkv.view(qkv.shape[0], *self.shape_kgH)
        if self.recompute_core and torch.is_grad_enabled():
            attended = checkpoint(
                self.core, qkv_TkgH, sequences, use_reentrant=False, preserve_rng_state=False
            )
        else:
            attended = self.core(qkv_TkgH, sequences)
        out: Tensor = self.out(attended)
        return out

    def core(self, qkv_TkgH: Tensor, sequences: Sequences) -> Tensor:
        """Norm heads, rotate and attend: [T, k, g + 2, H] -> [T, n * H]."""
        if self.head_norm is not None:
            qkv_TkgH = self.head_norm(qkv_TkgH)
        copy_values = torch.is_grad_enabled() and not self.recompute_core
        tables = sequences.tables[self.kind.rotation]
        q, k, v = _SplitRotate.apply(qkv_TkgH, *tables, self.ops, copy_values)
        tokens, head_dim = q.shape[0], q.shape[-1]
        q_TnH, k_TkH, v_TkH = q.view(tokens, -1, head_dim), k.squeeze(2), v.squeeze(2)
        window, cache, scale = self.kind.window, sequences.cache, self.scale
        mask = sequences.masks[window]
        if cache is None:
            out = self.ops.attention(q_TnH, k_TkH, v_TkH, mask, self.dropout(sequences), scale)
        else:
            out = cache.attend(self.layer, q_TnH, k_TkH, v_TkH, mask, window, self.ops, scale)
        return out.flatten(1)

    def dropout(self, sequences: Sequences) -> kernels.AttentionDropout | None:
        """The dropout of this rank's attention weights; None drops nothing."""
        at = sequences.dropout
        if self.dropout_p == 0 or at is None:
            return None
        key = at.key(self.layer, "attention")
        return kernels.AttentionDropout(self.dropout_p, key, at.first_token, self.first_head)


class _SplitRotate(torch.autograd.Function):
    """Rotated queries [T, k, g, H] and keys, and values [T, k, 1, H], of packed heads.

    copy_values: a view of values would keep all packed heads in memory for the backward. It is
    enough where they stay in memory anyway, or there is no backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv_TkgH: Tensor,
        cos_sh: Tensor,
        sin_sh: Tensor,
        ops: kernels.Kernels,
        copy_values: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos_sh, sin_sh)
        ctx.ops = ops
        return ops.rotate(qkv_TkgH, cos_sh, sin_sh, copy_values)

    @staticmethod
    def backward(
        ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        cos_sh, sin_sh = ctx.saved_tensors
        tokens, groups, queries, head_dim = dq.shape
        dqkv = dq.new_empty(tokens, groups, queries + 2, head_dim)
        ctx.ops.rotate_grad_(dqkv, dq, dk, dv, cos_sh, sin_sh)
        return dqkv, None, None, None, None
