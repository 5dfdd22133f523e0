"""Scale and cast with saturation in Triton: out = saturate(x * scale) in out's type.

Values beyond the largest finite number of out's type become that number; NaN stays NaN. The scale
is read on the device, so a kernel may have computed it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.arguments import cdiv, check_float
from megalite.kernels.triton.launch import prepared
from megalite.kernels.triton.tables import choose

OUT_TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@prepared
@triton.jit
def _cast_kernel(
    x_ptr, out_ptr, scale_ptr, num_elements, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    # comparisons with NaN are false, so NaN passes both
    x = tl.where(x > LARGEST, LARGEST, x)
    x = tl.where(x < -LARGEST, -LARGEST, x)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def scale_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """saturate(x * scale) in another type; scale: one float32 on the device.

    Raises TypeError, ValueError.
    """
    check_float("scale_cast", x=x)
    if dtype not in OUT_TYPES:
        raise TypeError(f"scale_cast: to {dtype}, expected one of {OUT_TYPES}")
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(
            f"scale_cast: scale is {scale.dtype} {tuple(scale.shape)}, not one float32"
        )

    # An empty grid cannot be launched.
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        use = choose("cast")
        _cast_kernel[(cdiv(x.numel(), use["block"]),)](
            x,
            out,
            scale,
            x.numel(),
            LARGEST=torch.finfo(dtype).max,
            **use["launch"],
        )
    return out
