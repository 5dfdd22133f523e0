"""Which kernels a run uses: settled by `kernels` and the device, before anything is built."""

from __future__ import annotations

from typing import Any

import torch

from megalite.config import RunConfig
from megalite.errors import ConfigError
from megalite.kernels import BackendError, Kernels, select
from megalite.kernels.tables import table_hash


def choose_kernels(config: RunConfig, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The operations that `kernels` and `optimizer.adam` name.

    Raises ConfigError where they cannot be had, or where the model has a shape or the optimizer a
    type that they do not take.
    """
    adam = "auto" if config.optimizer.adam == "fused" else config.optimizer.adam
    try:
        ops = select(
            config.kernels.backend,
            device,
            dtype,
            attention=config.kernels.attention,
            norm=config.kernels.norm,
            adam=adam,
        )
        ops.check_model(config.model.head_size, config.model.hidden_size)
    except BackendError as error:
        raise ConfigError(str(error)) from error
    return ops


def kernel_record(ops: Kernels) -> dict[str, Any]:
    """What decides the order of sums in a run's kernels, for its record and its checkpoints."""
    return {"name": ops.name, "table": table_hash() if ops.consumes else None}


def kernel_notice(saved: dict[str, Any] | None, now: dict[str, Any]) -> str | None:
    """What to say where a checkpoint was saved under other kernels; losses may differ by rounding.

    None if they are the same, or the checkpoint does not say.
    """
    if saved is None or saved == now:
        return None
    old, new = (_told(record) for record in (saved, now))
    return f"kernels are {new}, saved with {old}: losses go on, but not with the same bits"


def _told(record: dict[str, Any]) -> str:
    table = f" (table {record['table'][:12]})" if record["table"] else ""
    return f"{record['name']}{table}"
