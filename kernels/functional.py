"""Every operation as a differentiable function: for models of your own, and for torch.compile.

Each goes through a custom operator `torch.ops.megalite.*`, which torch.compile keeps whole. On CUDA
they are Triton kernels, on CPU plain torch (`dispatch.select` says when). Shapes: T tokens, D
columns, N query heads, K key/value heads, H head dim, V vocabulary; dims before D may be several.
All raise TypeError and ValueError from the kernels for types and shapes that these do not take.
"""

from __future__ import annotations

# Registers the operators' gradients.
import megalite.kernels.library_autograd  # noqa: F401
import torch
from megalite.kernels import (
    library_attention,
    library_loss,
    library_moe,
    library_norm,
    library_optimizer,
    library_pointwise,
)
from megalite.kernels.intervals import Intervals, document_intervals
from megalite.kernels.reference import IGNORE_INDEX
from megalite.kernels.reference_moe import RowMap
from torch import Tensor

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
    update t from 1. weight: float32 (the master), or float64 with a float64 hyper; grad, moments
    and low: any type of storage. weight_decay is scaled by lr, as torch.optim.AdamW does.
    """
    library_optimizer.adamw_(
        weight, grad, exp_avg, exp_avg_sq, hyper, beta1, beta2, eps, weight_decay, low
    )


def sum_squares(x: Tensor) -> Tensor:
    """Sum of squares of a tensor of any shape, in a fixed order: float64, 0-d, no gradient."""
    return library_optimizer.sum_squares(x)


def scale_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in another floating type (float8 too), too large values becoming its largest.

    scale: one float32 on the device. NaN stays NaN; no gradient.
    """
    return library_optimizer.scale_cast(x, scale, dtype)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def rms_norm(x: Tensor, weight_D: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim."""
    return library_norm.rms_norm(_rows(x), weight_D, eps)[0].view(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_D: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(norm of s, s) with s = x + residual, rounded to its type before the norm."""
    y, s, _ = library_norm.add_rms_norm(_rows(x), _rows(residual), weight_D, eps)
    return y.view(x.shape), s.view(x.shape)


def layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim."""
    return library_norm.layer_norm(_rows(x), weight_D, bias_D, eps)[0].view(x.shape)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(LayerNorm of s, s) with s = x + residual."""
    y, s, _, _ = library_norm.add_layer_norm(_rows(x), _rows(residual), weight_D, bias_D, eps)
    return y.view(x.shape), s.view(x.shape)


def swiglu(h: Tensor) -> Tensor:
    """silu(gate) * up of rows that hold gate | up: [..., 2f] -> [..., f]."""
    return library_pointwise.swiglu(_rows(h)).view(*h.shape[:-1], h.shape[-1] // 2)


def gelu(h: Tensor, bias_f: Tensor | None = None, *, erf: bool = False) -> Tensor:
    """gelu(h + bias) in the tanh form, or the exact one."""
    return library_pointwise.bias_gelu(_rows(h), bias_f, erf).view(h.shape)


def rope(x_TNH: Tensor, cos_sh: Tensor, sin_sh: Tensor, position_T: Tensor | None = None) -> Tensor:
    """Every head of x[T, N, H] turned by its token's position: position_T[t], or t mod s.

    cos_sh, sin_sh: tables [s, R/2] of `rope_tables`; elements from R on are copied.
    """
    return library_pointwise.rope(x_TNH, cos_sh, sin_sh, position_T, False)


def dropout(x_TD: Tensor, key: tuple[int, int], p: float, first_token: int = 0) -> Tensor:
    """x / (1 - p) where kept, else 0; the mask is a function of (key, first_token + t, column)."""
    return library_pointwise.dropout(x_TD, *key, p, first_token)


def attention(
    q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, mask: Intervals, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(o[T, N, H], lse[N, T]): query i sees keys mask.lo[i] <= j < mask.up[i].

    `document_intervals` makes masks of packed documents, causal or not, with a window or not. lse
    has no gradient. scale: of the scores, 1 / sqrt(H) by default.
    """
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

    Labels equal to ignore_index lose nothing. vocab_size: the true vocabulary where columns are
    padded; smoothing is over it.
    """
    size = logits_TV.shape[1] if vocab_size is None else vocab_size
    return library_loss.cross_entropy(
        logits_TV, label_T, weight_T, ignore_index, z_loss, smoothing, size
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
    """`cross_entropy` of x @ weight^T with at most chunk_tokens rows of logits alive at a time."""
    size = weight_VD.shape[0] if vocab_size is None else vocab_size
    return library_loss.linear_cross_entropy(
        x_TD, weight_VD, label_T, weight_T, ignore_index, z_loss, smoothing, size, chunk_tokens
    )[0]


def expert_rows(expert_TK: Tensor, num_experts: int) -> RowMap:
    """The map that sorts copies of tokens by expert, stably and on the device.

    expert_TK: int32 or int64 [T, K], each token's experts; one outside 0 ... E - 1 drops the copy.
    """
    return RowMap(*library_moe.expert_rows(expert_TK, num_experts))


def permute(x_TD: Tensor, rows: RowMap) -> Tensor:
    """y[T * K, D]: each copy of a token in its row, zeros in the rows of dropped copies."""
    return library_moe.permute(x_TD, *rows)


def unpermute(y_RD: Tensor, rows: RowMap, weight_TK: Tensor | None = None) -> Tensor:
    """out[T, D]: the sum of each token's rows, times its router weights."""
    return library_moe.unpermute(y_RD, *rows, weight_TK)


def grouped_linear(x_RD: Tensor, weight_EFD: Tensor, rows: RowMap) -> Tensor:
    """y[R, F] = x @ weight[e]^T for the rows of each expert e, 0 in the rows after the last."""
    return library_moe.grouped_linear(x_RD, weight_EFD, rows.offset_E1)
