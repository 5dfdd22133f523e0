"""The names under which views of a run (TensorBoard, wandb) show its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Warn = Callable[[str], None]

_PERF = ("step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "mfu_causal")
_NOT_SCALARS = ("kind", "attempt", "step")


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by the names that views show; empty for a line without any to plot.

    Names are `train/loss`, `perf/mfu`, `memory/memory_peak_bytes`, `eval/NAME/loss`,
    `train/grad_norms/GROUP`, `train/param_stats/PARAMETER/rms`.
    """
    if record["kind"] == "step":
        numbers = {k: v for k, v in record.items() if k not in _NOT_SCALARS}
        return {f"{_folder(name)}/{name}": value for name, value in _flat(numbers)}
    if record["kind"] == "eval":
        place = f"eval/{record.get('name', 'validation')}"
        numbers = {k: v for k, v in record.items() if k not in (*_NOT_SCALARS, "name")}
        return {f"{place}/{name}": value for name, value in _flat(numbers)}
    return {}


def _folder(name: str) -> str:
    if name in _PERF or name.startswith("time_"):
        return "perf"
    return "memory" if name.startswith("memory_") else "train"


def _flat(numbers: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of all numbers in nested dicts, the names joined by "/"."""
    for name, value in numbers.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + name, value
