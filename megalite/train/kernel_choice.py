"""Which kernels a run uses: settled by `kernels` and the device, before anything is built."""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch

from megalite.config import RunConfig
from megalite.errors import CheckpointError, ConfigError
from megalite.kernels import BackendError, Kernels, select
from megalite.kernels.triton.tables import table_hash


def choose_kernels(config: RunConfig, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The operations that `kernels` and `optimizer.adam` name.

    Raises ConfigError where they cannot be had, with a line for each setting, or where the model
    has a shape that they do not take.
    """
    backend, others = config.kernels.backend, _others(config)
    asked = {"backend": backend, **others}
    problems = [
        told for name, value in asked.items() if (told := _problem(device, dtype, {name: value}))
    ]
    if problems:
        raise ConfigError(problems)
    ops = select(backend, device, dtype, **others)
    told = _misfit(config, ops)
    if told is not None:
        raise ConfigError(told)
    return ops


def generation_kernels(config: RunConfig, device: torch.device, dtype: torch.dtype) -> Kernels:
    """What continues texts with a run's weights, which may be on another kind of machine.

    `auto` for the device; plain torch where the run asked for it, or where the model has a shape
    that Triton has no kernels for. Raises ConfigError where Triton is there but broken.
    """
    if config.kernels.backend == "reference":
        return Kernels()
    try:
        ops = select("auto", device, dtype)
    except BackendError as error:
        raise ConfigError(str(error)) from error
    return ops if _misfit(config, ops) is None else Kernels()


def _others(config: RunConfig) -> dict[str, str]:
    """Single operations that do not come from the backend, by the name `select` has for them."""
    adam = config.optimizer.adam
    named = {"attention": config.kernels.attention, "norm": config.kernels.norm, "adam": adam}
    return {name: value for name, value in named.items() if value not in ("auto", "fused")}


def _problem(device: torch.device, dtype: torch.dtype, options: dict[str, str]) -> str | None:
    try:
        select(device=device, dtype=dtype, **{"backend": "reference", **options})
    except BackendError as error:
        return str(error)
    return None


def _misfit(config: RunConfig, ops: Kernels) -> str | None:
    """Why these operations do not take the config's model."""
    try:
        ops.check_model(config.model.head_size, config.model.hidden_size)
    except BackendError as error:
        return str(error)
    return None


def plain_on_gpu(
    config: RunConfig, ops: Kernels, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """What to say where `auto` computes in plain torch although the device is a GPU: why."""
    if config.kernels.backend != "auto" or device.type == "cpu" or ops.uses_tables:
        return []
    told = _problem(device, dtype, {"backend": "triton"})
    return [] if told is None else [f"plain torch computes on {device.type}: {told}"]


def kernel_record(ops: Kernels) -> dict[str, Any]:
    """What decides the order of sums in a run's kernels, for its record and its checkpoints."""
    return {"name": ops.name, "table": table_hash() if ops.uses_tables else None}


def kernel_notice(saved: Any, now: dict[str, Any], where: str) -> str | None:
    """What to say where a checkpoint was saved under other kernels; losses may differ by rounding.

    None if they are the same, or the checkpoint, `where`, does not say. CheckpointError where what
    it says is no record of kernels.
    """
    if saved is None or saved == now:
        return None
    new, old = _told(now), _told(saved)
    if old is None:
        raise CheckpointError(
            f"{where}: its record of kernels is {_shown(saved)}, wanted a name and a table's hash "
            "or none; it is damaged or of another version: resume with the version that saved it, "
            "or from another checkpoint"
        )
    return f"kernels are {new}, saved with {old}: losses go on, but not with the same bits"


def _told(record: Any) -> str | None:
    """A record in words, None for what is no record."""
    if not isinstance(record, dict):
        return None
    name, table = record.get("name"), record.get("table")
    if not isinstance(name, str) or not isinstance(table, (str, NoneType)):
        return None
    return f"{name} (table {table[:12]})" if table else name


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
