"""AdamW on flat slices: one fused kernel call per rule. Knows no ranks and no parameters.

For a slice with weight w, gradient g and moments m, v, at update number t (from 1):

    w <- w * (1 - lr * weight_decay)
    m <- beta1 * m + (1 - beta1) * g          v <- beta2 * v + (1 - beta2) * g^2
    w <- w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

(Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; decay is scaled by lr, as torch
does.) The kernel is torch's own `_fused_adamw_`, which exists for CPU and CUDA. Moments stored in
bfloat16 are widened, updated and rounded to nearest, a block at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.optim.groups import Rule

_BLOCK = 1 << 22  # elements of bf16 moments widened at a time: bounds the temporaries to 32 MiB


@dataclass(frozen=True)
class Run:
    """A contiguous range of this rank's state whose parameters share one rule.

    All four are 1-D views of equal length: weight (or master), gradient, moments. The first two
    have one type; moments have it, too, or are bfloat16.
    """

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    rule: Rule


@torch.no_grad()
def adamw_update(runs: Sequence[Run], config: OptimizerConfig, lr: float, step: Tensor) -> None:
    """Update all runs in place with rate `lr`; `step` is the update number t as a 0-d fp32 tensor.

    Gradients must be reduced and clipped already.
    """
    for rule in dict.fromkeys(run.rule for run in runs):
        group = [run for run in runs if run.rule == rule]
        narrow = [run for run in group if run.exp_avg.dtype != run.weight.dtype]
        _fused([run for run in group if run.exp_avg.dtype == run.weight.dtype], config, lr, step)
        for run in narrow:
            _update_narrow(run, config, lr, step)


def _update_narrow(run: Run, config: OptimizerConfig, lr: float, step: Tensor) -> None:
    """The same update of a run whose moments are stored in fewer bits than its weights."""
    for start in range(0, len(run.weight), _BLOCK):
        here = slice(start, start + _BLOCK)
        stored = run.exp_avg[here], run.exp_avg_sq[here]
        wide = [moment.to(run.weight.dtype) for moment in stored]
        part = Run(run.weight[here], run.grad[here], wide[0], wide[1], run.rule)
        _fused([part], config, lr, step)
        for moment, value in zip(stored, wide, strict=True):
            moment.copy_(value)


def _fused(group: Sequence[Run], config: OptimizerConfig, lr: float, step: Tensor) -> None:
    if not group:
        return
    torch._fused_adamw_(
        [run.weight for run in group],
        [run.grad for run in group],
        [run.exp_avg for run in group],
        [run.exp_avg_sq for run in group],
        [],
        [step] * len(group),
        lr=lr * group[0].rule.lr_scale,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=group[0].rule.weight_decay,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
    )
