"""The operations in plain torch: their definition, the CPU path, and the reference of all tests.

Shapes: T tokens, D model, F feed-forward, N query heads, K key/value heads, H head dim,
V vocabulary; lower case = this rank's shard. Storage dtype in, storage dtype out; everything that
sums (norms, softmax, loss, weight gradients) is computed in at least float32. On CPU, matrix
products of 16-bit tensors are products of float32 copies, rounded once, which equals a float32
accumulator; `processor_products` has faster ones.

Functions that end in `_` write into their first argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.kernels.plain.blocks import low_precision_on_cpu, sum_dtype


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """y[T, F] = x[T, D] @ weight[F, D]^T + bias[F]."""
    if low_precision_on_cpu(x_TD):
        wide_F = None if bias_F is None else bias_F.float()
        return linear(x_TD.float(), weight_FD.float(), wide_F).to(x_TD.dtype)
    if bias_F is not None:
        return torch.addmm(bias_F, x_TD, weight_FD.t())
    return x_TD @ weight_FD.t()


def linear_input_grad(dy_TF: Tensor, weight_FD: Tensor) -> Tensor:
    """dx[T, D] = dy[T, F] @ weight[F, D]."""
    if low_precision_on_cpu(dy_TF):
        return (dy_TF.float() @ weight_FD.float()).to(dy_TF.dtype)
    return dy_TF @ weight_FD


def accumulate_weight_grad_(buffer_FD: Tensor, dy_TF: Tensor, x_TD: Tensor) -> None:
    """buffer[F, D] += dy[T, F]^T @ x[T, D], summed in the buffer's dtype.

    The product of 16-bit inputs is never rounded to 16 bits before it is added to a float32 buffer:
    on CUDA one product adds into the buffer, on CPU it is a product of widened inputs.
    """
    if buffer_FD.dtype == dy_TF.dtype:
        buffer_FD.addmm_(dy_TF.t(), x_TD)
    elif dy_TF.device.type == "cpu":
        buffer_FD.addmm_(dy_TF.to(buffer_FD.dtype).t(), x_TD.to(buffer_FD.dtype))
    else:
        torch.addmm(buffer_FD, dy_TF.t(), x_TD, out_dtype=buffer_FD.dtype, out=buffer_FD)


def bias_grad(dy_TF: Tensor) -> Tensor:
    """db[F] = sum over T of dy, in the summing dtype."""
    return dy_TF.sum(0, dtype=sum_dtype(dy_TF.dtype))


def add_column_sums_(buffer_D: Tensor, partial_PD: Tensor) -> None:
    """buffer[D] += sum over P of partial[P, D]: what is left of a gradient that programs share."""
    buffer_D.add_(partial_PD.sum(0))


def embedding_grad_(buffer_vD: Tensor, dy_TD: Tensor, row_T: Tensor) -> None:
    """Add dy's rows to the buffer's rows row_T, int64 [T]; rows outside of 0 ... v - 1 add nothing.

    Deterministic: rows are added in token order on CPU, in sorted runs on CUDA.
    """
    absent_T = (row_T < 0) | (row_T >= len(buffer_vD))
    dy_TD = dy_TD.to(buffer_vD.dtype).masked_fill(absent_T.unsqueeze(1), 0.0)
    row_T = row_T.clamp(0, len(buffer_vD) - 1)
    if dy_TD.device.type == "cpu":
        buffer_vD.index_add_(0, row_T, dy_TD)
    else:
        buffer_vD.index_put_((row_T,), dy_TD, accumulate=True)


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
    new weight in its own type. Computed in weight's type.
    """
    lr, bias1, bias2, factor = hyper.to(weight.dtype).unbind()
    g = grad.to(weight.dtype) * factor
    m = (exp_avg.to(weight.dtype) * beta1).add_(g, alpha=1.0 - beta1)
    v = (exp_avg_sq.to(weight.dtype) * beta2).addcmul_(g, g, value=1.0 - beta2)
    weight.sub_(lr * weight_decay * weight)
    weight.sub_(lr / bias1 * (m / (v.sqrt() / bias2.sqrt() + eps)))

    # Last: the weight has been computed from the moments before they are rounded to their type.
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if low is not None:
        low.copy_(weight)


def scale_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """saturate(x * scale) in another type; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return (x.to(sum_dtype(x.dtype)) * scale).clamp_(-largest, largest).to(dtype)
