"""NVIDIA's apex: FusedAdam as an `AdamWPlan`, and its RMSNorm as the norms of `Kernels`.

Shapes: T tokens, D model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.kernels.adamw_operations import AdamWPlan, AdamWRun, AdamWSettings, check_count
from megalite.kernels.errors import BackendError
from megalite.kernels.operations import Kernels
from megalite.kernels.others.probe import apex_attribute


class ApexAdamW:
    """An `AdamWPlan` by apex.optimizers.FusedAdam over the runs' own float32 weights.

    FusedAdam's own master weights (which need capturable=True) are not used: it updates the runs'.
    The number of updates and the moments also belong to the runs: both are passed to FusedAdam
    before each step and read back after it, so checkpoints, ZeRO and resumes work as with the other
    plans. Raises BackendError unless weights, gradients and moments are float32.
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

        # FusedAdam has rate and decay by group of parameters, so runs are grouped by both.
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

        # An optimizer without parameters raises, and a rank may have none to update.
        self._adam = None
        if groups:
            betas = (settings.beta1, settings.beta2)
            self._adam = fused_adam(groups, lr=0.0, betas=betas, eps=settings.eps, adam_w_mode=True)

    def _paired(self) -> list[tuple[nn.Parameter, AdamWRun]]:
        return list(zip(self._params, self._runs, strict=True))

    @torch.no_grad()
    def update(self, lr: float, num_updates: int, factor: float) -> None:
        """See `AdamWPlan`. Raises BackendError if FusedAdam counts its updates differently."""
        assert factor == 1.0, "the gradients of this plan are multiplied before"
        check_count(num_updates)
        adam = self._adam
        if adam is None:
            return
        for group, scale in zip(adam.param_groups, self._scales, strict=True):
            group["lr"], group["step"] = lr * scale, num_updates - 1

        # FusedAdam may replace state tensors by new ones, hence the copies back.
        for param, run in self._paired():
            param.grad = run.grad
            adam.state[param] = {"exp_avg": run.exp_avg, "exp_avg_sq": run.exp_avg_sq}
        adam.step()
        for param, run in self._paired():
            _copy_back(run.weight, param.data)
            _copy_back(run.exp_avg, adam.state[param]["exp_avg"])
            _copy_back(run.exp_avg_sq, adam.state[param]["exp_avg_sq"])

        for group in adam.param_groups:
            if int(group["step"]) != num_updates:
                raise BackendError(
                    f"optimizer.adam=apex: this FusedAdam counts {group['step']} updates after "
                    f"update {num_updates}; its bias corrections would be wrong; use another "
                    "version of apex, or optimizer.adam=fused"
                )


def _rule(run: AdamWRun) -> tuple[float, float]:
    """The hyperparameters that FusedAdam has by group."""
    return run.lr_scale, run.weight_decay


def _copy_back(to: Tensor, source: Tensor) -> None:
    """Copy `source` to `to`, unless both are the same memory."""
    if source.data_ptr() != to.data_ptr():
        to.copy_(source)


def apex_adamw(device: torch.device) -> Callable[..., AdamWPlan]:
    """`Kernels.adamw_plan` by apex. Raises BackendError with what to install or to change."""
    setting = "optimizer.adam=apex"
    _require_cuda(setting, device, "optimizer.adam=fused")
    return partial(ApexAdamW, fused_adam=apex_attribute("apex.optimizers", "FusedAdam", setting))


class ApexNorm:
    """RMSNorm by the extension behind apex.normalization.FusedRMSNorm; by `own` kernels LayerNorm
    and norms with an offset.

    Its weight gradient is summed in float32 but rounded to the weight's type.
    """

    def __init__(self, own: Kernels, extension: Any) -> None:
        self._own, self._extension = own, extension

    def norm(
        self,
        x_TD: Tensor,
        weight_D: Tensor,
        bias_D: Tensor | None,
        eps: float,
        residual_TD: Tensor | None = None,
        *,
        offset: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """See `plain.norms.norm`."""
        if bias_D is not None or offset:
            return self._own.norm(x_TD, weight_D, bias_D, eps, residual_TD, offset=offset)
        s_TD = (x_TD if residual_TD is None else x_TD + residual_TD).contiguous()
        shape = [s_TD.shape[-1]]
        y_TD, rstd_T = self._extension.rms_forward_affine(s_TD, shape, weight_D.contiguous(), eps)
        return y_TD, s_TD, None, rstd_T.view(-1, 1)

    def norm_grad(
        self,
        dy_TD: Tensor,
        s_TD: Tensor,
        weight_D: Tensor,
        mean_T1: Tensor | None,
        rstd_T1: Tensor,
        ds_TD: Tensor | None = None,
        *,
        offset: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `plain.norms.norm_grad`."""
        if mean_T1 is not None or offset:
            own = self._own.norm_grad
            return own(dy_TD, s_TD, weight_D, mean_T1, rstd_T1, ds_TD, offset=offset)
        unused_eps = 0.0  # read only in the form that does not save its input
        dx_TD, dweight_D = self._extension.rms_backward_affine(
            dy_TD.contiguous(),
            rstd_T1.flatten(),
            s_TD,
            [s_TD.shape[-1]],
            weight_D.contiguous(),
            unused_eps,
            False,
        )
        return dx_TD if ds_TD is None else dx_TD.add_(ds_TD), dweight_D.float().unsqueeze(0), None


def apex_norm(own: Kernels, device: torch.device) -> ApexNorm:
    """RMSNorm by apex. Raises BackendError with what to install or to change."""
    setting = "kernels.norm=apex"
    _require_cuda(setting, device, "kernels.norm=auto")
    apex_attribute("apex.normalization", "FusedRMSNorm", setting)
    for function in ("rms_forward_affine", "rms_backward_affine"):
        apex_attribute("fused_layer_norm_cuda", function, setting)
    return ApexNorm(own, importlib.import_module("fused_layer_norm_cuda"))


def _require_cuda(setting: str, device: torch.device, instead: str) -> None:
    if device.type != "cuda":
        raise BackendError(
            f"{setting} needs a CUDA device, this one is {device.type}; use {instead}"
        )
