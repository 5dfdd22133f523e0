"""What NVIDIA's apex and torch's packed attention compute, in plain torch, for tests without a GPU.

Written from what they document: signatures, where state lies, which numbers come out.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.plain.attention import attention
from megalite.kernels.plain.norms import rms_norm, rms_norm_grad


class FusedAdam(torch.optim.Optimizer):
    """apex's: moments by parameter, the number of steps by group, decay added to the update."""

    in_place = True  # whether moments are updated where they lie
    counts = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        assert adam_w_mode
        assert bias_correction
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + self.counts
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                state = self.state[param]
                if not self.in_place:
                    state.update({kind: moment.clone() for kind, moment in state.items()})
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(beta1).add_(param.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                corrected = v / (1 - beta2 ** group["step"])
                update = m / (1 - beta1 ** group["step"]) / (corrected.sqrt() + group["eps"])
                param.sub_(group["lr"] * (update + group["weight_decay"] * param))


class MovingFusedAdam(FusedAdam):
    in_place = False


class ForgetfulFusedAdam(FusedAdam):
    counts = False


class FusedRMSNorm:
    """Only its being there is looked at."""


def rms_forward_affine(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> Any:
    assert shape == [x.shape[-1]]
    y, rstd = rms_norm(x, weight, eps)
    return y, rstd.flatten()


def rms_backward_affine(
    dy: Tensor,
    rstd: Tensor,
    x: Tensor,
    shape: list[int],
    weight: Tensor,
    eps: float,
    memory_efficient: bool,
) -> tuple[Tensor, Tensor]:
    assert not memory_efficient
    dx, dweight = rms_norm_grad(dy, x, weight, rstd.view(-1, 1))
    return dx, dweight.to(weight.dtype)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn for masks that look at nothing ahead."""
    bounds = cu_seq_q.tolist()
    assert cu_seq_q.dtype == torch.int32
    assert cu_seq_k.tolist() == bounds
    assert max_q == max_k == max(stop - start for start, stop in pairwise(bounds))
    assert enable_gqa == (query.shape[1] != key.shape[1])
    back, ahead = window_size
    assert ahead == 0
    return attention(query, key, value, bounds, None if back < 0 else back + 1, scale=scale)
