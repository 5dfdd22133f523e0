"""Inputs in every dtype and stride, and the check of a result against its float64 definition."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.tolerances import FLOAT32, PLAIN_FLOAT64, ROUNDED_ONCE_NOISE

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
STRIDES = ["rows", "transposed", "every_second", "offset"]


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Standard normal values that depend on shape and seed only."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def with_strides(x: Tensor, strides: str) -> Tensor:
    """The same values in another memory layout."""
    if strides == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if strides == "every_second":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
        wide[..., ::2] = x
        return wide[..., ::2]
    if strides == "offset":
        tall = x.new_full((x.shape[0] + 3, *x.shape[1:]), torch.nan)
        tall[2:-1] = x
        return tall[2:-1]
    return x


def exact(x: Tensor) -> Tensor:
    """A float64 leaf of the same values."""
    return x.detach().double().requires_grad_()


def scale_of(want: Tensor) -> float:
    """Largest magnitude; 1 for zeros, such as the gradient of a query that sees only itself."""
    return float(want.abs().max()) or 1.0


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest magnitude of `want`; NaN anywhere gives NaN."""
    if want.numel() == 0:
        return 0.0
    want = want.detach()
    return float((got.detach().double() - want.double()).abs().max()) / scale_of(want)


def assert_matches(got: Tensor | None, want: Tensor | None) -> None:
    """`got` is the float64 `want`, as near as its dtype allows when rounded only once.

    A gradient that is missing (None) fails.
    """
    assert got is not None
    assert want is not None
    want = want.detach()
    assert got.shape == want.shape
    assert want.dtype == torch.float64
    if got.dtype == torch.bfloat16:
        half_unit = torch.exp2(want.abs().clamp_min(1e-30).log2().floor() - 8)
        allowed = half_unit + ROUNDED_ONCE_NOISE * scale_of(want)
        assert ((got.double() - want).abs() <= allowed).all(), relative_error(got, want)
    else:
        bar = PLAIN_FLOAT64 if got.dtype == torch.float64 else FLOAT32
        assert relative_error(got, want) <= bar
