"""A set of operations with single ones taken from elsewhere: attention, RMSNorm, AdamW."""

from __future__ import annotations

from typing import Any

import torch

from megalite.kernels.errors import BackendError
from megalite.kernels.operations import Kernels

_OWN = "auto"


def with_adapters(
    ops: Kernels, device: torch.device, attention: str, norm: str, adam: str
) -> Kernels:
    """`ops` with the named adapters' methods in place of its own; "auto" leaves them.

    Raises BackendError for a name that is not known, or an adapter that is not there.
    """
    taken: list[tuple[Any, tuple[str, ...]]] = []
    if attention != _OWN:
        from megalite.kernels.others.attention import attention_adapter

        taken.append((attention_adapter(attention, device), ("attention_mask", "attention")))
    for setting, choice in (("kernels.norm", norm), ("optimizer.adam", adam)):
        if choice not in (_OWN, "apex"):
            raise BackendError(f"{setting} is {choice!r}; allowed: auto, apex")
    if norm != _OWN:
        from megalite.kernels.others.apex import apex_rms_norm

        taken.append((apex_rms_norm(device), ("rms_norm", "rms_norm_grad")))
    if adam != _OWN:
        from megalite.kernels.others.apex import apex_adamw

        taken.append((apex_adamw(ops, device), ("adamw_plan",)))
    for adapter, methods in taken:
        for method in methods:
            setattr(ops, method, getattr(adapter, method))
    named = ((attention, "attention"), (norm, "norm"), (adam, "adam"))
    others = [f"{what}={choice}" for choice, what in named if choice != _OWN]
    ops.name = " ".join([ops.name, *others])
    return ops
