"""AdamW on flat slices: one fused kernel call per decay group. Knows no ranks and no parameters.

For a slice with weight w, gradient g and moments m, v, at update number t (from 1):

    w <- w * (1 - lr * weight_decay)
    m <- beta1 * m + (1 - beta1) * g          v <- beta2 * v + (1 - beta2) * g^2
    w <- w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

(Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; decay is scaled by lr, as torch
does.) The kernel is torch's own `_fused_adamw_`, which exists for CPU and CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config import OptimizerConfig


@dataclass(frozen=True)
class Run:
    """A contiguous range of this rank's state whose parameters share one decay setting.

    All four are 1-D views of equal length and type: weight (or master), gradient, moments.
    """

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    decay: bool


@torch.no_grad()
def adamw_update(runs: Sequence[Run], config: OptimizerConfig, lr: float, step: Tensor) -> None:
    """Update all runs in place with rate `lr`; `step` is the update number t as a 0-d fp32 tensor.

    Gradients must be reduced and clipped already.
    """
    for decay in (True, False):
        group = [run for run in runs if run.decay == decay]
        if group:
            torch._fused_adamw_(
                [run.weight for run in group],
                [run.grad for run in group],
                [run.exp_avg for run in group],
                [run.exp_avg_sq for run in group],
                [],
                [step] * len(group),
                lr=lr,
                beta1=config.beta1,
                beta2=config.beta2,
                weight_decay=config.weight_decay if decay else 0.0,
                eps=config.eps,
                amsgrad=False,
                maximize=False,
            )
