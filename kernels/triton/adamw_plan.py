"""A step of AdamW in one pass over memory for each run, with the changing numbers on the device.

A run's gradient is read once and multiplied by the clip coefficient over the loss scale; its
weight, moments and 16-bit copy are written in the same pass. Numbers that change from step to step
are in one small tensor on the device, so no kernel is compiled again and none waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.kernels.adamw_operations import AdamWRun, AdamWSettings, check_count
from megalite.kernels.triton.adamw import adamw_, sum_squares
from megalite.kernels.upload import upload


def square_sums(xs: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over all of some contiguous 1-D tensors of `device`: 0-d float64."""
    sums = torch.zeros(max(len(xs), 1), dtype=torch.float64, device=device)
    for i, x in enumerate(xs):
        sum_squares(x, sums[i : i + 1])
    return sums.sum()


class OnePassAdamW:
    """An `AdamWPlan` with one kernel launch for each run."""

    takes_factor = True
    writes_low = True

    def __init__(self, runs: Sequence[AdamWRun], settings: AdamWSettings) -> None:
        self._runs, self._settings = list(runs), settings
        self._scales = list(dict.fromkeys(run.lr_scale for run in runs))

    @torch.no_grad()
    def update(self, lr: float, num_updates: int, factor: float) -> None:
        """See `AdamWPlan`."""
        check_count(num_updates)
        if not self._runs:
            return
        settings = self._settings
        bias1 = 1.0 - settings.beta1**num_updates
        bias2 = 1.0 - settings.beta2**num_updates
        # One row for each rate scale, as `adamw_` reads it, and one copy for all.
        rows = [[lr * scale, bias1, bias2, factor] for scale in self._scales]
        hyper = upload(torch.tensor(rows, dtype=torch.float32), self._runs[0].weight.device)
        for run in self._runs:
            adamw_(
                run.weight,
                run.grad,
                run.exp_avg,
                run.exp_avg_sq,
                hyper[self._scales.index(run.lr_scale)],
                beta1=settings.beta1,
                beta2=settings.beta2,
                eps=settings.eps,
                weight_decay=run.weight_decay,
                low=run.low,
            )
