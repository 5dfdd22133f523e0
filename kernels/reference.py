"""The operations in plain torch: their definition, the CPU path, and the oracle of every test.

Shapes: T tokens, D model, F feed-forward, N query heads, K key/value heads, H head dim,
V vocabulary; lower case = this rank's shard. Storage dtype in, storage dtype out; everything that
sums (norms, softmax, loss, weight gradients) is computed in at least float32. On CPU, matrix
products of 16-bit tensors are sums in float32, rounded once: by the processor's own instructions
for bfloat16 where it has them, else of float32 copies.

Functions that end in `_` write into their first argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from megalite.kernels.reference_blocks import low_precision_on_cpu, sum_dtype
from torch import Tensor

# What this torch has on CUDA for products of 16-bit tensors whose result is not rounded to 16 bits.
_WIDE_ADDMM = "dtype_out" in torch.ops.aten.addmm.overloads()
_WIDE_MM = "dtype" in torch.ops.aten.mm.overloads()
_ONEDNN_LINEAR = hasattr(torch.ops.mkldnn, "_linear_pointwise")
_SMALL_PRODUCT = 1 << 20  # multiplications, below which oneDNN's calls cost more than MKL takes


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """y[T, F] = x[T, D] @ weight[F, D]^T + bias[F]."""
    if _widened(x_TD, weight_FD, bias_F):
        wide_F = None if bias_F is None else bias_F.float()
        return linear(x_TD.float(), weight_FD.float(), wide_F).to(x_TD.dtype)
    return _product(x_TD, weight_FD.t(), bias_F)


def linear_input_grad(dy_TF: Tensor, weight_FD: Tensor) -> Tensor:
    """dx[T, D] = dy[T, F] @ weight[F, D]."""
    if _widened(dy_TF, weight_FD):
        return _product(dy_TF.float(), weight_FD.float()).to(dy_TF.dtype)
    return _product(dy_TF, weight_FD)


def accumulate_weight_grad_(buffer_FD: Tensor, dy_TF: Tensor, x_TD: Tensor) -> None:
    """buffer[F, D] += dy[T, F]^T @ x[T, D], summed in the buffer's dtype.

    The product of 16-bit inputs is never rounded to 16 bits on its way into a float32 buffer: one
    product that accumulates into it where this torch has that, else a float32 product that is then
    added, else one of widened inputs.
    """
    dtype = buffer_FD.dtype
    if dtype == dy_TF.dtype or dy_TF.device.type == "cpu":
        dy_FT, x_TD = dy_TF.to(dtype).t(), x_TD.to(dtype)
        if _onednn_is_quicker(dy_FT, x_TD):
            buffer_FD += _product(dy_FT, x_TD)
        else:
            buffer_FD.addmm_(dy_FT, x_TD)
    elif _WIDE_ADDMM:
        torch.addmm(buffer_FD, dy_TF.t(), x_TD, out_dtype=dtype, out=buffer_FD)
    elif _WIDE_MM:
        buffer_FD.add_(torch.mm(dy_TF.t(), x_TD, out_dtype=dtype))
    else:
        buffer_FD.addmm_(dy_TF.to(dtype).t(), x_TD.to(dtype))


def _product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """a @ b + bias."""
    if _onednn_is_quicker(a_MK, b_KN):
        return torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), bias_N, "none", [], "")
    return a_MK @ b_KN if bias_N is None else torch.addmm(bias_N, a_MK, b_KN)


def _onednn_is_quicker(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Whether to call oneDNN for a float32 product on CPU, which torch gives to MKL.

    Both are as exact. Called by itself, oneDNN's has no gradient.
    """
    return (
        a_MK.device.type == "cpu"
        and a_MK.dtype == b_KN.dtype == torch.float32
        and a_MK.numel() * b_KN.shape[1] >= _SMALL_PRODUCT
        and not (torch.is_grad_enabled() and (a_MK.requires_grad or b_KN.requires_grad))
        and _mkl_leaves_half()
    )


def _widened(*factors: Tensor | None) -> bool:
    """Whether a product is one of float32 copies: on CPU, of 16 bits that it has no product for."""
    types = {x.dtype for x in factors if x is not None}
    return any(low_precision_on_cpu(x) for x in factors if x is not None) and not (
        types == {torch.bfloat16} and _multiplies_bfloat16()
    )


@cache
def _multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16: torch then calls oneDNN, which sums in float32.

    Without such instructions torch's product is as exact, but many times slower than float32's.
    """
    named = any(_processor().get(name) for name in ("avx512_bf16", "amx_bf16"))
    return named and torch.backends.mkldnn.is_available()


@cache
def _mkl_leaves_half() -> bool:
    """Whether MKL computes without AVX-512 although the processor has it: on AMD's."""
    described = _processor().get("avx512_f", False) and "AMD" in _processor().get("cpu_name", "")
    return described and torch.backends.mkldnn.is_available() and _ONEDNN_LINEAR


def _processor() -> Mapping[str, Any]:
    """What torch knows of this processor; not every torch tells."""
    return getattr(torch.cpu, "get_capabilities", dict)()


def bias_grad(dy_TF: Tensor) -> Tensor:
    """db[F] = sum over T of dy, in the summing dtype."""
    return dy_TF.sum(0, dtype=sum_dtype(dy_TF.dtype))


def embedding_grad_(buffer_vD: Tensor, dy_TD: Tensor, row_T: Tensor, owned_T: Tensor) -> None:
    """Add dy's rows into the buffer's rows; tokens that this shard does not own add nothing.

    row_T: int64 [T], the row in this shard (any valid row where owned_T is False).
    Deterministic: one writer per row in token order on CPU, sorted segments on CUDA.
    """
    dy_TD = dy_TD.to(buffer_vD.dtype) * owned_T.unsqueeze(1)
    if dy_TD.device.type == "cpu":
        buffer_vD.index_add_(0, row_T, dy_TD)
    else:
        rows = buffer_vD.shape[0]
        buffer_vD += torch.ops.aten.embedding_dense_backward(dy_TD, row_T, rows, -1, False)


# --- optimizer and casts -------------------------------------------------------------------------


def adamw_(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    low: Tensor | None = None,
) -> None:
    """One AdamW update, in place, of flat tensors, as a formula of plain torch operations.

    hyper: [4] on the device = lr, 1 - beta1^t, 1 - beta2^t, factor of the gradient. low: gets the
    new weight in its own type. Computed in weight's type, moments rounded as they are stored.
    """
    lr, bias1, bias2, factor = hyper.to(weight.dtype).unbind()
    g = grad.to(weight.dtype) * factor
    m = (exp_avg.to(weight.dtype) * beta1).add_(g, alpha=1.0 - beta1)
    v = (exp_avg_sq.to(weight.dtype) * beta2).addcmul_(g, g, value=1.0 - beta2)
    weight.sub_(lr * weight_decay * weight)
    weight.sub_(lr / bias1 * (m / (v.sqrt() / bias2.sqrt() + eps)))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if low is not None:
        low.copy_(weight)


def scale_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """saturate(x * scale) in another type; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return (x.to(sum_dtype(x.dtype)) * scale).clamp_(-largest, largest).to(dtype)
