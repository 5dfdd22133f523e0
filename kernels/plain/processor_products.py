"""Matrix products by the fastest library on the CPU; shapes and types as in `plain.products`.

bfloat16 products use the processor's own instructions if it has them; float32 products use oneDNN
on processors where MKL leaves half of the vector width unused. On other devices, and for arguments
that the fast products do not take, the products of `plain.products` are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.plain import products
from megalite.kernels.plain.blocks import low_precision_on_cpu

_ONEDNN_LINEAR = hasattr(torch.ops.mkldnn, "_linear_pointwise")
_SMALL_PRODUCT = 1 << 20  # multiplications; below it a call of oneDNN costs more than MKL's product


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """y[T, F] = x[T, D] @ weight[F, D]^T + bias[F]."""
    factors = [x_TD, weight_FD] if bias_F is None else [x_TD, weight_FD, bias_F]
    if any(map(low_precision_on_cpu, factors)) and not _bfloat16_is_quick(*factors):
        wide_F = None if bias_F is None else bias_F.float()
        return linear(x_TD.float(), weight_FD.float(), wide_F).to(x_TD.dtype)
    return _product(x_TD, weight_FD.t(), bias_F)


def linear_input_grad(dy_TF: Tensor, weight_FD: Tensor) -> Tensor:
    """dx[T, D] = dy[T, F] @ weight[F, D]."""
    if low_precision_on_cpu(dy_TF) and not _bfloat16_is_quick(dy_TF, weight_FD):
        return _product(dy_TF.float(), weight_FD.float()).to(dy_TF.dtype)
    return _product(dy_TF, weight_FD)


def accumulate_weight_grad_(buffer_FD: Tensor, dy_TF: Tensor, x_TD: Tensor) -> None:
    """buffer[F, D] += dy[T, F]^T @ x[T, D], summed in the buffer's dtype.

    On CPU torch has no product of 16-bit factors into float32, so float32 copies are multiplied.
    """
    if dy_TF.device.type != "cpu":
        products.accumulate_weight_grad_(buffer_FD, dy_TF, x_TD)
        return
    dy_FT, x_TD = dy_TF.to(buffer_FD.dtype).t(), x_TD.to(buffer_FD.dtype)
    if buffer_FD.shape == (len(dy_FT), x_TD.shape[1]) and _onednn_is_quicker(dy_FT, x_TD):
        buffer_FD += _product(dy_FT, x_TD)
    else:
        buffer_FD.addmm_(dy_FT, x_TD)


def _product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """a @ b + bias."""
    if _onednn_is_quicker(a_MK, b_KN, bias_N):
        bias_N = None if bias_N is None else bias_N.contiguous()  # oneDNN ignores its strides
        out: Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), bias_N, "none", [], "")
        return out
    return a_MK @ b_KN if bias_N is None else torch.addmm(bias_N, a_MK, b_KN)


def _onednn_is_quicker(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> bool:
    """True if oneDNN should compute a product that torch would give to MKL.

    True only for float32 products on CPU that oneDNN's operator takes, and without autograd, as the
    operator has no gradient. Its errors are two to three times MKL's at some thousand terms, and
    less at a million.
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
    """True if x or its transpose has contiguous rows that do not overlap."""
    (rows, columns), (down, along) = x.shape, x.stride()
    return (along == 1 and down >= columns) or (down == 1 and along >= rows)


def _bfloat16_is_quick(*factors: Tensor) -> bool:
    """True if all factors are bfloat16 and this processor multiplies them as they are."""
    return all(x.dtype == torch.bfloat16 for x in factors) and _multiplies_bfloat16()


@cache
def _multiplies_bfloat16() -> bool:
    """True if this processor has bfloat16 products: torch then uses oneDNN, which sums in float32.

    Without such instructions torch's product is as exact, but many times slower than float32's.
    """
    named = any(_processor().get(name) for name in ("avx512_bf16", "amx_bf16"))
    return named and torch.backends.mkldnn.is_available()


@cache
def _mkl_leaves_half() -> bool:
    """True if MKL does not use this processor's AVX-512, as on AMD's, and oneDNN is there."""
    described = _processor().get("avx512_f", False) and "AMD" in _processor().get("cpu_name", "")
    return described and torch.backends.mkldnn.is_available() and _ONEDNN_LINEAR


def _processor() -> Mapping[str, Any]:
    """The capabilities of this processor by name; empty if this torch does not report them."""
    return getattr(torch.cpu, "get_capabilities", dict)()
