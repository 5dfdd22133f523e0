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


class AdamW:
    """Updates a fixed set of runs: those of one rule in one kernel call, sorted out once."""

    def __init__(self, runs: Sequence[Run], config: OptimizerConfig) -> None:
        self._config = config
        self._narrow = [run for run in runs if run.exp_avg.dtype != run.weight.dtype]
        wide = [run for run in runs if run.exp_avg.dtype == run.weight.dtype]
        self._groups = [
            (rule, _columns([run for run in wide if run.rule == rule]))
            for rule in dict.fromkeys(run.rule for run in wide)
        ]

    @torch.no_grad()
    def update(self, lr: float, step: Tensor) -> None:
        """Update all runs in place with rate `lr`; `step` is the update number t, 0-d fp32.

        Gradients must be reduced and clipped already.
        """
        for rule, columns in self._groups:
            _fused(columns, rule, self._config, lr, step)
        for run in self._narrow:
            self._update_narrow(run, lr, step)

    def _update_narrow(self, run: Run, lr: float, step: Tensor) -> None:
        """The same update of a run whose moments are stored in fewer bits than its weights."""
        for start in range(0, len(run.weight), _BLOCK):
            here = slice(start, start + _BLOCK)
            stored = run.exp_avg[here], run.exp_avg_sq[here]
            m, v = (moment.to(run.weight.dtype) for moment in stored)
            columns = ([run.weight[here]], [run.grad[here]], [m], [v])
            _fused(columns, run.rule, self._config, lr, step)
            stored[0].copy_(m)
            stored[1].copy_(v)


Columns = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def _columns(group: Sequence[Run]) -> Columns:
    """Weights, gradients and moments of runs, as the kernel takes them."""
    return (
        [run.weight for run in group],
        [run.grad for run in group],
        [run.exp_avg for run in group],
        [run.exp_avg_sq for run in group],
    )


def _fused(columns: Columns, rule: Rule, config: OptimizerConfig, lr: float, step: Tensor) -> None:
    torch._fused_adamw_(
        *columns,
        [],
        [step] * len(columns[0]),
        lr=lr * rule.lr_scale,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=rule.weight_decay,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
    )
