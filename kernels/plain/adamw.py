"""AdamW over flat runs and sums of squares in plain torch; the rule is in `adamw_operations`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.kernels.adamw_operations import AdamWRun, AdamWSettings, check_count

_BLOCK = 1 << 22  # elements widened at a time, so a temporary takes at most 32 MiB


def square_sums(xs: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over all of some contiguous 1-D tensors of `device`: 0-d float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for x in xs:
        total += square_sum(x)
    return total


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares of a 1-D tensor, accumulated in float64; a 0-d float64 tensor."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for block in torch.split(x, _BLOCK):
        wide = block.double()
        total += torch.dot(wide, wide)
    return total


class FusedAdamW:
    """The reference plan: torch's `_fused_adamw_`, which exists for CPU and CUDA.

    One call for all runs of equal rate and decay. Moments stored in bfloat16 are widened, updated
    and rounded to nearest, a block at a time.
    """

    takes_factor = False
    writes_low = False

    def __init__(self, runs: Sequence[AdamWRun], settings: AdamWSettings) -> None:
        self._settings = settings
        self._narrow = [run for run in runs if run.exp_avg.dtype != run.weight.dtype]
        wide = [run for run in runs if run.exp_avg.dtype == run.weight.dtype]
        rules = dict.fromkeys((run.lr_scale, run.weight_decay) for run in wide)
        self._groups = [
            (rule, _columns([r for r in wide if (r.lr_scale, r.weight_decay) == rule]))
            for rule in rules
        ]
        device = runs[0].weight.device if runs else torch.device("cpu")
        self._step = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, lr: float, num_updates: int, factor: float) -> None:
        """See `AdamWPlan`."""
        assert factor == 1.0, "the gradients of this plan are multiplied before"
        check_count(num_updates)
        self._step.fill_(num_updates)
        for (lr_scale, weight_decay), columns in self._groups:
            self._fused(columns, lr * lr_scale, weight_decay)
        for run in self._narrow:
            self._update_narrow(run, lr * run.lr_scale)

    def _update_narrow(self, run: AdamWRun, lr: float) -> None:
        """The update of a run whose moments are stored in fewer bits than its weights."""
        for start in range(0, len(run.weight), _BLOCK):
            here = slice(start, start + _BLOCK)
            stored = run.exp_avg[here], run.exp_avg_sq[here]
            m, v = (moment.to(run.weight.dtype) for moment in stored)
            columns = ([run.weight[here]], [run.grad[here]], [m], [v])
            self._fused(columns, lr, run.weight_decay)
            stored[0].copy_(m)
            stored[1].copy_(v)

    def _fused(self, columns: Columns, lr: float, weight_decay: float) -> None:
        torch._fused_adamw_(
            *columns,
            [],
            [self._step] * len(columns[0]),
            lr=lr,
            beta1=self._settings.beta1,
            beta2=self._settings.beta2,
            weight_decay=weight_decay,
            eps=self._settings.eps,
            amsgrad=False,
            maximize=False,
        )


Columns = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def _columns(group: Sequence[AdamWRun]) -> Columns:
    """Weights, gradients and moments of runs, each as a list, as the fused kernel takes them."""
    return (
        [run.weight for run in group],
        [run.grad for run in group],
        [run.exp_avg for run in group],
        [run.exp_avg_sq for run in group],
    )
