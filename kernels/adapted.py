"""Kernels with single operations taken from other packages: attention, RMSNorm, AdamW."""

from __future__ import annotations

import torch

from megalite.kernels.errors import BackendError
from megalite.kernels.operations import Kernels

_OWN = "auto"


def with_adapters(
    ops: Kernels, device: torch.device, attention: str, norm: str, adam: str
) -> Kernels:
    """`ops`, with its operations replaced by those of the named packages; "auto" leaves its own.

    Raises BackendError for a name that is not known, or a package that cannot be used here.
    """
    # Each package is imported only if it is named: importing one may be slow, or may fail.
    if attention != _OWN:
        from megalite.kernels.others.attention import attention_adapter

        ops.attention_operations = attention_adapter(attention, device)

    for setting, choice in (("kernels.norm", norm), ("optimizer.adam", adam)):
        if choice not in (_OWN, "apex"):
            raise BackendError(f"{setting} is {choice!r}; allowed: auto, apex")
    if norm != _OWN:
        from megalite.kernels.others.apex import apex_rms_norm

        ops.rms_norm_operations = apex_rms_norm(device)
    if adam != _OWN:
        from megalite.kernels.others.apex import apex_adamw

        ops.adamw_operations = apex_adamw(ops.adamw_operations, device)

    # The name goes into the log and into checkpoints, which must show what computed the numbers.
    named = (("attention", attention), ("norm", norm), ("adam", adam))
    others = [f"{operation}={choice}" for operation, choice in named if choice != _OWN]
    ops.name = " ".join([ops.name, *others])
    return ops
