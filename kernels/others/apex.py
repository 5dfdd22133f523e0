"""NVIDIA's apex: FusedAdam as an update, and RMSNorm, in the shapes of this package.

Shapes: T tokens, D model.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.kernels.adamw_operations import (
    AdamWOperations,
    AdamWPlan,
    AdamWRun,
    AdamWSettings,
    check_count,
)
from megalite.kernels.errors import BackendError
from megalite.kernels.others.probe import apex_attribute


class ApexAdamW:
    """An `AdamWPlan` by apex.optimizers.FusedAdam over the runs' own float32 weights.

    Its own master weights (which need capturable=True) are not used: ours are what it updates. The
    number of updates and the moments are ours, too: both are handed to it before each step and
    taken back after it, so that checkpoints, ZeRO and resumes see the same state as ever.
    """

    takes_factor = False
    writes_low = False

    def __init__(
        self, runs: Sequence[AdamWRun], settings: AdamWSettings, fused_adam: type[Any]
    ) -> None:
        for run in runs:
            if not run.weight.dtype == run.grad.dtype == run.exp_avg.dtype == torch.float32:
                raise BackendError(
                    f"optimizer.adam=apex takes float32 weights, gradients and moments; got "
                    f"{run.weight.dtype}, {run.grad.dtype} and {run.exp_avg.dtype}; set "
                    "optimizer.moment_dtype=float32, or optimizer.adam=fused"
                )
        self._runs = list(runs)
        self._params = [nn.Parameter(run.weight) for run in runs]  # the same memory
        rules = dict.fromkeys((run.lr_scale, run.weight_decay) for run in runs)
        self._scales = [lr_scale for lr_scale, _ in rules]
        groups = [
            {
                "params": [p for p, run in self._paired() if _rule(run) == rule],
                "weight_decay": rule[1],
            }
            for rule in rules
        ]
        self._adam = None
        if groups:
            betas = (settings.beta1, settings.beta2)
            self._adam = fused_adam(groups, lr=0.0, betas=betas, eps=settings.eps, adam_w_mode=True)

    def _paired(self) -> list[tuple[nn.Parameter, AdamWRun]]:
        return list(zip(self._params, self._runs, strict=True))

    @torch.no_grad()
    def update(self, lr: float, num_updates: int, factor: float) -> None:
        """See `AdamWPlan`."""
        assert factor == 1.0, "the gradients of this plan are multiplied before"
        check_count(num_updates)
        adam = self._adam
        if adam is None:
            return
        for group, scale in zip(adam.param_groups, self._scales, strict=True):
            group["lr"], group["step"] = lr * scale, num_updates - 1
        for param, run in self._paired():
            param.grad = run.grad
            adam.state[param] = {"exp_avg": run.exp_avg, "exp_avg_sq": run.exp_avg_sq}
        adam.step()
        for param, run in self._paired():
            _take_back(run.weight, param.data)
            for kind, ours in (("exp_avg", run.exp_avg), ("exp_avg_sq", run.exp_avg_sq)):
                _take_back(ours, adam.state[param][kind])
        for group in adam.param_groups:
            if int(group["step"]) != num_updates:
                raise BackendError(
                    f"optimizer.adam=apex: this FusedAdam counts {group['step']} updates after "
                    f"update {num_updates}; its bias corrections would be wrong; use another "
                    "version of apex, or optimizer.adam=fused"
                )


def _rule(run: AdamWRun) -> tuple[float, float]:
    return run.lr_scale, run.weight_decay


def _take_back(ours: Tensor, theirs: Tensor) -> None:
    """Copy, unless it is the memory that was handed over."""
    if theirs.data_ptr() != ours.data_ptr():
        ours.copy_(theirs)


class ApexOperations:
    """`AdamWOperations` whose update is apex's and whose sums are those of `base`."""

    def __init__(self, base: AdamWOperations, fused_adam: type[Any]) -> None:
        self._base, self._fused_adam = base, fused_adam

    def adamw_plan(self, runs: Sequence[AdamWRun], settings: AdamWSettings) -> AdamWPlan:
        """FusedAdam over the runs."""
        return ApexAdamW(runs, settings, self._fused_adam)

    def square_sums(self, xs: Sequence[Tensor], device: torch.device) -> Tensor:
        """As `base` has it."""
        return self._base.square_sums(xs, device)


def apex_adamw(base: AdamWOperations, device: torch.device) -> AdamWOperations:
    """`base` with apex's update. Raises BackendError with what to install or to change."""
    _require_cuda("optimizer.adam=apex", device, "optimizer.adam=fused")
    fused_adam = apex_attribute("apex.optimizers", "FusedAdam", "optimizer.adam=apex")
    return ApexOperations(base, fused_adam)


class ApexRMSNorm:
    """RMSNorm by the extension behind apex.normalization.FusedRMSNorm, forward and backward.

    Its weight gradient is summed in float32 but rounded to the weight's type.
    """

    def __init__(self, extension: Any) -> None:
        self._extension = extension

    def rms_norm(
        self, x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(y[T, D], s[T, D], rstd[T, 1]) of s = x + residual, rounded before the norm."""
        s_TD = (x_TD if residual_TD is None else x_TD + residual_TD).contiguous()
        shape = [s_TD.shape[-1]]
        y_TD, rstd_T = self._extension.rms_forward_affine(s_TD, shape, weight_D.contiguous(), eps)
        return y_TD, s_TD, rstd_T.view(-1, 1)

    def rms_norm_grad(
        self,
        dy_TD: Tensor,
        s_TD: Tensor,
        weight_D: Tensor,
        rstd_T1: Tensor,
        ds_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(dx[T, D], dweight[D], float32); ds: what reaches s past the norm, added to dx."""
        unused_eps = 0.0  # only the form that saves no input reads it
        dx_TD, dweight_D = self._extension.rms_backward_affine(
            dy_TD.contiguous(),
            rstd_T1.flatten(),
            s_TD,
            [s_TD.shape[-1]],
            weight_D.contiguous(),
            unused_eps,
            False,
        )
        return dx_TD if ds_TD is None else dx_TD.add_(ds_TD), dweight_D.float()


def apex_rms_norm(device: torch.device) -> ApexRMSNorm:
    """apex's RMSNorm. Raises BackendError with what to install or to change."""
    asked = "kernels.norm=apex"
    _require_cuda(asked, device, "kernels.norm=auto")
    apex_attribute("apex.normalization", "FusedRMSNorm", asked)
    apex_attribute("fused_layer_norm_cuda", "rms_forward_affine", asked)
    apex_attribute("fused_layer_norm_cuda", "rms_backward_affine", asked)
    return ApexRMSNorm(importlib.import_module("fused_layer_norm_cuda"))


def _require_cuda(asked: str, device: torch.device, instead: str) -> None:
    if device.type != "cuda":
        raise BackendError(f"{asked} needs a CUDA device, this one is {device.type}; use {instead}")
