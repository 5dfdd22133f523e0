"""Matrix products by the quickest that the CPU has; shapes and types as in `plain.products`.

bfloat16 by the processor's own instructions where it has them, float32 by oneDNN where MKL leaves
half of the processor unused. Other devices, and whatever a quick product does not take, get those
of `plain.products`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.plain import products as reference
from megalite.kernels.plain.blocks import low_precision_on_cpu

_ONEDNN_LINEAR = hasattr(torch.ops.mkldnn, "_linear_pointwise")
_SMALL_PRODUCT = 1 << 20  # multiplications, below which oneDNN's calls cost more than MKL takes


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """y[T, F] = x[T, D] @ weight[F, D]^T + bias[F]."""
    factors = [x_TD, weight_FD] if bias_F is None else [x_TD, weight_FD, bias_F]
    if any(map(low_precision_on_cpu, factors)) and not _bfloat16_is_quick(*factors):
        return linear(*(x.float() for x in factors)).to(x_TD.dtype)
    return _product(x_TD, weight_FD.t(), bias_F)


def linear_input_grad(dy_TF: Tensor, weight_FD: Tensor) -> Tensor:
    """dx[T, D] = dy[T, F] @ weight[F, D]."""
    if low_precision_on_cpu(dy_TF) and not _bfloat16_is_quick(dy_TF, weight_FD):
        return _product(dy_TF.float(), weight_FD.float()).to(dy_TF.dtype)
    return _product(dy_TF, weight_FD)


def accumulate_weight_grad_(buffer_FD: Tensor, dy_TF: Tensor, x_TD: Tensor) -> None:
    """buffer[F, D] += dy[T, F]^T @ x[T, D], summed in the buffer's dtype.

    torch has no product of 16 bits into float32 on CPU, so it is one of float32 copies.
    """
    if dy_TF.device.type != "cpu":
        reference.accumulate_weight_grad_(buffer_FD, dy_TF, x_TD)
        return
    dy_FT, x_TD = dy_TF.to(buffer_FD.dtype).t(), x_TD.to(buffer_FD.dtype)
    if buffer_FD.shape == (len(dy_FT), x_TD.shape[1]) and _onednn_is_quicker(dy_FT, x_TD):
        buffer_FD += _product(dy_FT, x_TD)
    else:
        buffer_FD.addmm_(dy_FT, x_TD)


def _product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """a @ b + bias."""
    if _onednn_is_quicker(a_MK, b_KN, bias_N):
        bias_N = None if bias_N is None else bias_N.contiguous()  # its strides are not looked at
        return torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), bias_N, "none", [], "")
    return a_MK @ b_KN if bias_N is None else torch.addmm(bias_N, a_MK, b_KN)


def _onednn_is_quicker(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> bool:
    """Whether to call oneDNN for a float32 product on CPU, which torch gives to MKL.

    Its errors are two to three times MKL's at some thousand terms, and less at a million. Called by
    itself it has no gradient, and takes only what this lets through.
    """
    bias = [] if bias_N is None else [bias_N]
    tensors = [a_MK, b_KN, *bias]
    return (
        all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)
        and a_MK.shape[1] == b_KN.shape[0]
        and all(x.shape == b_KN.shape[1:] for x in bias)
        and a_MK.numel() * b_KN.shape[1] >= _SMALL_PRODUCT
        and _has_rows(a_MK)
        and _has_rows(b_KN)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and _mkl_leaves_half()
    )


def _has_rows(x: Tensor) -> bool:
    """Whether x or its transpose lies in rows that do not overlap."""
    (rows, columns), (down, along) = x.shape, x.stride()
    return (along == 1 and down >= columns) or (down == 1 and along >= rows)


def _bfloat16_is_quick(*factors: Tensor) -> bool:
    return all(x.dtype == torch.bfloat16 for x in factors) and _multiplies_bfloat16()


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
