"""Every operation as a differentiable function: for models of your own, and for torch.compile.

Each goes through a custom operator `torch.ops.megalite.*`, which torch.compile keeps whole. On CUDA
they are Triton kernels, on CPU plain torch (see `dispatch.select`). Shapes: T tokens, D columns,
N query heads, K key/value heads, H head dim, V vocabulary; dims before D may be several. All raise
TypeError and ValueError for arguments that they do not take, the same on every device (`checks`);
strides may be any. Labels and positions outside their range raise ValueError on the CPU and give
NaN on CUDA, where reading them would wait for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Registers the operators' gradients.
import megalite.kernels.operators.autograd  # noqa: F401
from megalite.kernels.arguments import rows_readable, vector
from megalite.kernels.operators import (
    attention as library_attention,
)
from megalite.kernels.operators import (
    checks,
)
from megalite.kernels.operators import (
    loss as library_loss,
)
from megalite.kernels.operators import (
    moe as library_moe,
)
from megalite.kernels.operators import (
    norm as library_norm,
)
from megalite.kernels.operators import (
    optimizer as library_optimizer,
)
from megalite.kernels.operators import (
    pointwise as library_pointwise,
)
from megalite.kernels.plain.intervals import Intervals, document_intervals
from megalite.kernels.plain.loss import IGNORE_INDEX
from megalite.kernels.plain.moe import RowMap

__all__ = [
    "Intervals",
    "RowMap",
    "adamw_",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "cross_entropy",
    "document_intervals",
    "dropout",
    "expert_rows",
    "gelu",
    "grouped_linear",
    "layer_norm",
    "linear_cross_entropy",
    "permute",
    "rms_norm",
    "rope",
    "scale_cast",
    "sum_squares",
    "swiglu",
    "unpermute",
]


def adamw_(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    low: Tensor | None = None,
) -> None:
    """One AdamW update in place of flat tensors of one length; `low` gets the new weight, rounded.

    hyper: float32 [4] on the device = lr, 1 - beta1^t, 1 - beta2^t, factor of the gradient, for
    update t from 1. weight: float32 (the master weight), or float64 with a float64 hyper; grad,
    moments and low: any storage type. weight_decay is scaled by lr, as torch.optim.AdamW does.
    """
    checks.check_tensor("adamw_", "hyper", hyper, checks.WIDE, (4,))
    library_optimizer.adamw_(
        weight, grad, exp_avg, exp_avg_sq, hyper, beta1, beta2, eps, weight_decay, low
    )


def sum_squares(x: Tensor) -> Tensor:
    """Sum of squares of a tensor of any shape, in a fixed order: float64, 0-d, no gradient."""
    checks.check_tensor("sum_squares", "x", x, checks.FLOATS)
    return library_optimizer.sum_squares(x)


def scale_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in another floating type (float8 too), saturated at its largest number.

    scale: one float32 on the device. NaN stays NaN; no gradient.
    """
    checks.check_cast(x, scale, dtype)
    return library_optimizer.scale_cast(x, scale, dtype)


def _rows(x: Tensor) -> Tensor:
    """The view [rows, columns] of any number of dims; a copy if rows are not contiguous."""
    if x.dim() != 2:
        x = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    return rows_readable(x)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim."""
    checks.check_norm("rms_norm", x, eps, weight=weight_D)
    return library_norm.rms_norm(_rows(x), weight_D.contiguous(), eps)[0].view(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_D: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(norm of s, s) with s = x + residual, rounded to its type before the norm."""
    checks.check_norm("add_rms_norm", x, eps, weight=weight_D)
    checks.check_residual("add_rms_norm", x, residual)
    y, s, _ = library_norm.add_rms_norm(_rows(x), _rows(residual), weight_D.contiguous(), eps)
    return y.view(x.shape), s.view(x.shape)


def layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim."""
    checks.check_norm("layer_norm", x, eps, weight=weight_D, bias=bias_D)
    weight_D, bias_D = weight_D.contiguous(), bias_D.contiguous()
    return library_norm.layer_norm(_rows(x), weight_D, bias_D, eps)[0].view(x.shape)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(LayerNorm of s, s) with s = x + residual."""
    checks.check_norm("add_layer_norm", x, eps, weight=weight_D, bias=bias_D)
    checks.check_residual("add_layer_norm", x, residual)
    weight_D, bias_D = weight_D.contiguous(), bias_D.contiguous()
    y, s, _, _ = library_norm.add_layer_norm(_rows(x), _rows(residual), weight_D, bias_D, eps)
    return y.view(x.shape), s.view(x.shape)


def swiglu(h: Tensor) -> Tensor:
    """silu(gate) * up of rows that hold gate | up: [..., 2f] -> [..., f]."""
    checks.check_swiglu(h)
    return library_pointwise.swiglu(_rows(h)).view(*h.shape[:-1], h.shape[-1] // 2)


def gelu(h: Tensor, bias_f: Tensor | None = None, *, erf: bool = False) -> Tensor:
    """gelu(h + bias) in the tanh form, or the exact one."""
    checks.check_gelu(h, bias_f)
    return library_pointwise.bias_gelu(_rows(h), vector(bias_f), erf).view(h.shape)


def rope(x_TNH: Tensor, cos_sh: Tensor, sin_sh: Tensor, position_T: Tensor | None = None) -> Tensor:
    """Every head of x[T, N, H] rotated by its token's position: position_T[t], or t mod s.

    cos_sh, sin_sh: tables [s, R/2] of `megalite.kernels.rope_tables`, float32; elements from R on
    are copied. position_T: int32 or int64, below s. Without it T <= s, or T is a multiple of s.
    """
    checks.check_rope(x_TNH, cos_sh, sin_sh, position_T)
    return library_pointwise.rope(x_TNH, cos_sh, sin_sh, position_T, False)


def dropout(x_TD: Tensor, key: tuple[int, int], p: float, first_token: int = 0) -> Tensor:
    """x / (1 - p) where kept, else 0; the mask is a function of key, first_token + t, column."""
    checks.check_dropout(x_TD, key, p)
    return library_pointwise.dropout(rows_readable(x_TD), *key, p, first_token)


def attention(
    q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, mask: Intervals, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(o[T, N, H], lse[N, T]): query i sees keys mask.lo[i] <= j < mask.up[i].

    `document_intervals` makes masks of packed documents, causal or not, with a window or not; the
    sequences of a batch are documents in a row. N is a multiple of the number of k's heads. lse
    has no gradient. scale: the factor of the scores, 1 / sqrt(H) by default. On the CPU all scores
    are in memory at once; on CUDA H is 16, 32, 64, 80, 96, 128 or 256.
    """
    checks.check_attention(q_TNH, k_SKH, v_SKH, mask, scale)
    mask = mask.cut(len(q_TNH), len(k_SKH))
    intervals = (mask.lo, mask.up, mask.key_lo, mask.key_up)
    return library_attention.attention(q_TNH, k_SKH, v_SKH, *intervals, scale)


def cross_entropy(
    logits_TV: Tensor,
    label_T: Tensor,
    weight_T: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    """loss[T], float32 (float64 for float64 logits): weight * (lse - target + z_loss * lse^2).

    label_T: int64. A label equal to ignore_index has loss 0. vocab_size: the true vocabulary if
    columns are padded; smoothing is over it. For the mean, divide `.sum()` by the number of tokens
    that are not ignored, or give each token one over that number as its weight.
    """
    # The checks below read the shape, so the logits come first.
    checks.check_tensor(
        "cross_entropy", "logits", logits_TV, checks.FLOATS, ("tokens", "vocabulary")
    )
    columns = logits_TV.shape[1]
    size = columns if vocab_size is None else vocab_size
    checks.check_loss(
        "cross_entropy",
        logits_TV,
        columns,
        label_T,
        weight_T,
        z_loss=z_loss,
        smoothing=smoothing,
        vocab_size=size,
    )

    return library_loss.cross_entropy(
        rows_readable(logits_TV), label_T, weight_T, ignore_index, z_loss, smoothing, size
    )[0]


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    label_T: Tensor,
    weight_T: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    vocab_size: int | None = None,
    chunk_tokens: int = 1024,
) -> Tensor:
    """`cross_entropy` of x @ weight^T with at most chunk_tokens rows of logits in memory."""
    # The checks further down read the shapes of x and weight, so those two come first.
    name = "linear_cross_entropy"
    checks.check_tensor(name, "x", x_TD, checks.FLOATS, ("tokens", "columns"))
    matrix = ("vocabulary", x_TD.shape[1])
    checks.check_tensor(name, "weight_VD", weight_VD, (x_TD.dtype,), matrix, x_TD)
    columns = weight_VD.shape[0]
    size = columns if vocab_size is None else vocab_size
    checks.check_range(name, "chunk_tokens", chunk_tokens, 1, math.inf)
    checks.check_loss(
        name,
        x_TD,
        columns,
        label_T,
        weight_T,
        z_loss=z_loss,
        smoothing=smoothing,
        vocab_size=size,
    )

    return library_loss.linear_cross_entropy(
        x_TD, weight_VD, label_T, weight_T, ignore_index, z_loss, smoothing, size, chunk_tokens
    )[0]


def expert_rows(expert_TK: Tensor, num_experts: int) -> RowMap:
    """The map that sorts copies of tokens by expert, stably and on the device.

    expert_TK: int32 or int64 [T, K], each token's experts; an index outside 0 ... E - 1 drops the
    copy.
    """
    checks.check_tensor("expert_rows", "expert", expert_TK, checks.INDEX)
    return RowMap(*library_moe.expert_rows(expert_TK, num_experts))


def permute(x_TD: Tensor, rows: RowMap) -> Tensor:
    """y[T * K, D]: each copy of a token in its row, zeros in the rows of dropped copies."""
    checks.check_tensor("permute", "x", x_TD, checks.FLOATS)
    tokens, _ = checks.check_map("permute", rows, x_TD)
    checks.check_tensor("permute", "x", x_TD, checks.FLOATS, (tokens, None))
    return library_moe.permute(rows_readable(x_TD), *rows)


def unpermute(y_RD: Tensor, rows: RowMap, weight_TK: Tensor | None = None) -> Tensor:
    """out[T, D]: the sum of each token's rows, times its router weights."""
    checks.check_tensor("unpermute", "y", y_RD, checks.FLOATS)
    tokens, copies = checks.check_map("unpermute", rows, y_RD)
    checks.check_tensor("unpermute", "y", y_RD, checks.FLOATS, (tokens * copies, None))
    if weight_TK is not None:
        types = checks.parameter_types(y_RD)
        checks.check_tensor("unpermute", "weight", weight_TK, types, (tokens, copies), y_RD)
    return library_moe.unpermute(rows_readable(y_RD), *rows, weight_TK)


def grouped_linear(x_RD: Tensor, weight_EFD: Tensor, rows: RowMap) -> Tensor:
    """y[R, F] = x @ weight[e]^T for the rows of each expert e, 0 in the rows after the last."""
    checks.check_tensor("grouped_linear", "x", x_RD, checks.FLOATS, ("rows", "columns"))
    tokens, copies = checks.check_map("grouped_linear", rows, x_RD)
    if len(x_RD) < tokens * copies:
        raise ValueError(f"grouped_linear: x has {len(x_RD)} rows, the map {tokens * copies}")
    matrices = (len(rows.offset_E1) - 1, "out", x_RD.shape[1])
    checks.check_tensor("grouped_linear", "weight", weight_EFD, (x_RD.dtype,), matrices, x_RD)
    return library_moe.grouped_linear(rows_readable(x_RD), weight_EFD.contiguous(), rows.offset_E1)
