"""The choice of a run's kernels, by `kernels` and the device, before anything is built."""

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
    # Each setting alone, so that one error names all that cannot be used.
    backend, others = config.kernels.backend, _single_operations(config)
    found = [_problem(device, dtype, backend, {})]
    found += [_problem(device, dtype, "reference", {name: others[name]}) for name in others]
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise ConfigError(problems)

    ops = select(backend, device, dtype, **others)
    problem = _model_problem(config, ops)
    if problem is not None:
        raise ConfigError(problem)
    return ops


def generation_kernels(config: RunConfig, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The operations for generating text with a run's weights, maybe on another kind of machine.

    `auto` for the device; plain torch if the run used it, or if the model has a shape that Triton
    has no kernels for. Raises ConfigError if Triton is installed but does not work.
    """
    if config.kernels.backend == "reference":
        return Kernels()
    try:
        ops = select("auto", device, dtype)
    except BackendError as error:
        raise ConfigError(str(error)) from error
    return ops if _model_problem(config, ops) is None else Kernels()


def _single_operations(config: RunConfig) -> dict[str, str]:
    """The operations that do not come from the backend, by the name of `select`'s parameter."""
    adam = config.optimizer.adam
    named = {"attention": config.kernels.attention, "norm": config.kernels.norm, "adam": adam}
    return {name: value for name, value in named.items() if value not in ("auto", "fused")}


def _problem(
    device: torch.device, dtype: torch.dtype, backend: str, others: dict[str, str]
) -> str | None:
    """The reason why these kernels cannot be used, or None."""
    try:
        select(backend, device, dtype, **others)
    except BackendError as error:
        return str(error)
    return None


def _model_problem(config: RunConfig, ops: Kernels) -> str | None:
    """The reason why these operations cannot compute the config's model, or None."""
    try:
        ops.check_model(config.model.head_size, config.model.hidden_size)
    except BackendError as error:
        return str(error)
    return None


def plain_on_gpu(
    config: RunConfig, ops: Kernels, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """A line with the reason if `auto` computes in plain torch on a GPU; otherwise none."""
    if config.kernels.backend != "auto" or device.type == "cpu" or ops.uses_tables:
        return []
    reason = _problem(device, dtype, "triton", {})
    return [] if reason is None else [f"plain torch computes on {device.type}: {reason}"]


def kernel_record(ops: Kernels) -> dict[str, Any]:
    """The kernels that decide the order of sums in a run, for its record and checkpoints."""
    return {"name": ops.name, "table": table_hash() if ops.uses_tables else None}


def kernel_notice(saved: Any, now: dict[str, Any], where: str) -> str | None:
    """A notice that a checkpoint was saved under other kernels, so that rounding may differ.

    saved: its record of kernels. None if there is no such record, or if it is the same as `now`.
    Raises CheckpointError, naming the checkpoint `where`, if `saved` is no record of kernels.
    """
    if saved is None or saved == now:
        return None
    new, old = _in_words(now), _in_words(saved)
    if old is None:
        raise CheckpointError(
            f"{where}: its record of kernels is {_shown(saved)}, wanted a name and a table's hash "
            "or none; it is damaged or of another version: resume with the version that saved it, "
            "or from another checkpoint"
        )
    return f"kernels are {new}, saved with {old}: losses go on, but not with the same bits"


def _in_words(record: Any) -> str | None:
    """A record of kernels in words; None if it is no such record."""
    if not isinstance(record, dict):
        return None
    name, table = record.get("name"), record.get("table")
    if not isinstance(name, str) or not isinstance(table, (str, NoneType)):
        return None
    return f"{name} (table {table[:12]})" if table else name


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
