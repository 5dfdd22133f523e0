"""AdamW over a flat shard in one pass, and the sum of squares for clipping, in Triton.

With weight w, gradient g (scaled by `clip`), moments m and v:

    w <- w * (1 - lr * weight_decay)
    m <- beta1 * m + (1 - beta1) * g          v <- beta2 * v + (1 - beta2) * g^2
    w <- w - lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps)

lr, bias1 = 1 - beta1^t, bias2 = 1 - beta2^t and clip are read from the device. So a step needs no
value on the host, no recompilation and no synchronisation, and clipping needs no pass over memory.
Elements are independent of each other, so a shard gives the same bits as the whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels.arguments import (
    cdiv,
    check_float,
    check_same,
    check_shape,
    num_programs,
)
from megalite.kernels.triton.launch import prepared
from megalite.kernels.triton.tables import choose

_SUM_TYPES = (torch.float32, torch.float64)


@prepared
@triton.jit
def _adamw_kernel(
    weight_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    low_ptr,
    hyper_ptr,
    num_elements,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    eps,
    weight_decay,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements

    # read on the device, so a new step needs neither a recompilation nor the host
    lr = tl.load(hyper_ptr)
    bias1 = tl.load(hyper_ptr + 1)
    bias2 = tl.load(hyper_ptr + 2)
    clip = tl.load(hyper_ptr + 3)

    g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * clip
    w = tl.load(weight_ptr + at, mask=inside, other=0.0)
    m = tl.load(exp_avg_ptr + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0).to(tl.float32)

    # correctly rounded roots and quotients, as on the CPU: the approximate ones would differ
    w = w - lr * weight_decay * w
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * (g * g)
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.sqrt_rn(bias2)) + eps
    w = w - tl.div_rn(lr, bias1) * tl.div_rn(m, denominator)

    tl.store(weight_ptr + at, w, mask=inside)
    tl.store(exp_avg_ptr + at, m.to(exp_avg_ptr.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq_ptr + at, v.to(exp_avg_sq_ptr.dtype.element_ty), mask=inside)
    if LOW:
        tl.store(low_ptr + at, w.to(low_ptr.dtype.element_ty), mask=inside)


@prepared
@triton.jit
def _sum_squares_kernel(x_ptr, partial_ptr, num_elements, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(program.to(tl.int64) * BLOCK, num_elements, step):
        x = tl.load(x_ptr + start + lane, mask=start + lane < num_elements, other=0.0)
        x = x.to(tl.float32).to(tl.float64)
        total += x * x
    tl.store(partial_ptr + program, tl.sum(total, 0))


@prepared
@triton.jit
def _sum_partials_kernel(
    partial_ptr, out_ptr, num_partials, BLOCK: tl.constexpr, ACCUMULATE: tl.constexpr
):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, num_partials, BLOCK):
        at = start + lane
        total += tl.load(partial_ptr + at, mask=at < num_partials, other=0.0)
    result = tl.sum(total, 0)
    if ACCUMULATE:
        result += tl.load(out_ptr).to(tl.float64)
    tl.store(out_ptr, result.to(out_ptr.dtype.element_ty))


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
    """One AdamW update, in place, of contiguous 1-D tensors of one length.

    weight: float32. grad: float32, bfloat16 or float16. Moments: float32 or bfloat16. low: gets the
    new weight in its own type. hyper: float32 [4] on the device = lr, 1 - beta1^t, 1 - beta2^t,
    factor of the gradient. Raises TypeError, ValueError.
    """
    # A wrong type, length or stride would not fail in the kernel: it would read other memory.
    length = weight.numel()
    check_float("adamw", grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, low=low)
    check_same("adamw", "types of the moments", exp_avg=exp_avg.dtype, exp_avg_sq=exp_avg_sq.dtype)
    tensors = {"weight": weight, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    check_shape("adamw", (length,), low=low, **tensors)
    if weight.dtype != torch.float32 or hyper.dtype != torch.float32 or hyper.shape != (4,):
        raise TypeError(
            f"adamw: weight is {weight.dtype}, hyper {hyper.dtype} {tuple(hyper.shape)}; expected "
            "float32 and float32 (4,)"
        )
    for name, x in {**tensors, "low": low}.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"adamw: {name} must be contiguous; pass flat buffers")

    if length:
        use = choose("adamw")
        _adamw_kernel[(cdiv(length, use["block"]),)](
            weight,
            grad,
            exp_avg,
            exp_avg_sq,
            low,
            hyper.contiguous(),
            length,
            beta1,
            beta2,
            1.0 - beta1,
            1.0 - beta2,
            eps,
            weight_decay,
            LOW=low is not None,
            **use["launch"],
        )


def sum_squares(
    x: Tensor, out: Tensor, *, accumulate: bool = False, programs: int | None = None
) -> Tensor:
    """out (one element, float32 or float64) (+)= sum of squares of a contiguous tensor.

    Summed in float64 and in a fixed order: memory is still the limit, and cutting a tensor in other
    shards changes the sum by 1e-15 only. Infinities and NaN are passed on. programs: the size of
    the grid, None for the device's. Raises TypeError, ValueError.
    """
    check_float("sum_squares", x=x)
    if not x.is_contiguous() or out.numel() != 1 or out.dtype not in _SUM_TYPES:
        raise ValueError(
            "sum_squares: x must be contiguous and out one float32 or float64 element; got strides "
            f"{x.stride()} and {out.dtype} {tuple(out.shape)}"
        )

    # Two kernels instead of atomic additions, whose order changes from run to run.
    use, last = choose("sum_squares"), choose("sum_partials")
    programs = programs or num_programs(x.device, use["programs_per_sm"])
    partial = x.new_empty(programs, dtype=torch.float64)
    _sum_squares_kernel[(programs,)](x, partial, x.numel(), **use["launch"])
    _sum_partials_kernel[(1,)](
        partial,
        out,
        programs,
        ACCUMULATE=accumulate,
        **last["launch"],
    )
    return out
