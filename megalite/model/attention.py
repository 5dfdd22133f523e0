"""Self-attention: packed QKV projection, rotary positions, causal attention, output projection.

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
from megalite.model.sequence import Sequences
from megalite.tensor_parallel.context import TensorParallel
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class SelfAttention(nn.Module):
    """Causal self-attention within documents.

    recompute_core: keep only the packed projection for the backward and run rotation and attention
    again, instead of keeping rotated heads, output and statistics.
    """

    def __init__(
        self, tp: TensorParallel, name: str, config: ModelConfig, *, recompute_core: bool
    ) -> None:
        super().__init__()
        heads, groups, head_dim = config.num_heads, config.kv_heads, config.head_size
        self.shape_kgH = (groups // tp.axis.size, heads // groups + 2, head_dim)
        self.recompute_core = recompute_core
        self.qkv = ColumnParallelLinear(
            tp, f"{name}.qkv", (groups, heads // groups + 2, head_dim, config.hidden_size)
        )
        self.out = RowParallelLinear(tp, f"{name}.out", (config.hidden_size, heads * head_dim))

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        qkv = self.qkv(x)
        qkv_TkgH = qkv.view(len(qkv), *self.shape_kgH)
        if self.recompute_core and torch.is_grad_enabled():
            context = checkpoint(
                self.core, qkv_TkgH, sequences, use_reentrant=False, preserve_rng_state=False
            )
        else:
            context = self.core(qkv_TkgH, sequences)
        out: Tensor = self.out(context)
        return out

    def core(self, qkv_TkgH: Tensor, sequences: Sequences) -> Tensor:
        """Rotate and attend: [T, k, g + 2, H] -> [T, n * H]."""
        q, k, v = _SplitRotate.apply(qkv_TkgH, sequences.cos_sh, sequences.sin_sh)
        tokens, head_dim = len(q), q.shape[-1]
        q_TnH = q.view(tokens, -1, head_dim)
        return kernels.attention(q_TnH, k.squeeze(2), v.squeeze(2), sequences.cu_seqlens).view(
            tokens, -1
        )


class _SplitRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TkgH: Tensor, cos_sh: Tensor, sin_sh: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos_sh, sin_sh)
        return kernels.rotate(qkv_TkgH, cos_sh, sin_sh)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None]:
        cos_sh, sin_sh = ctx.saved_tensors
        tokens, groups, queries, head_dim = dq.shape
        dqkv = dq.new_empty(tokens, groups, queries + 2, head_dim)
        kernels.rotate_grad_(dqkv, dq, dk, dv, cos_sh, sin_sh)
        return dqkv, None, None
