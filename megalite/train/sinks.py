"""Where a run's lines go: metrics.jsonl, which is the record, and views of it beside.

A view (TensorBoard, wandb) gets every line after the file has it, under the names of `scalars`. A
view that fails is told of once and left; it never ends or holds up a run. Rank 0 only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from megalite.config import RunConfig
from megalite.train.records import MetricsFile, read_lines

Warn = Callable[[str], None]

_PERF = ("step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "mfu_causal")
_NOT_SCALARS = ("kind", "attempt", "step")


class Sink(Protocol):
    """A view of the record. Whatever it raises is caught by `Recorder`."""

    name: str

    def write(self, record: dict[str, Any]) -> None:
        """Take a line, with its `kind` and `attempt`."""

    def close(self, exit_code: int) -> None:
        """Write out what is left."""


class Recorder:
    """Writes lines to metrics.jsonl and on to the views that the config asks for."""

    def __init__(self, folder: Path, config: RunConfig, warn: Warn) -> None:
        self._file = MetricsFile(folder / "metrics.jsonl")
        self._warn = warn
        self._sinks = open_sinks(folder, config, warn)

    @property
    def attempt(self) -> int:
        return self._file.attempt

    def write(self, kind: str, **values: Any) -> None:
        """Append one line. Raises MegaliteError if the file cannot take it, for no view's sake."""
        self._file.write(kind, **values)
        record = {"kind": kind, "attempt": self.attempt, **values}
        for sink in list(self._sinks):
            self._guarded(sink, partial(sink.write, record))

    def has(self, kind: str, step: int) -> bool:
        """Whether the record has a line of this kind for a step, of this attempt or another."""
        lines = read_lines(self._file.path).sound
        return any(line["kind"] == kind and line.get("step") == step for line in lines)

    def close(self, exit_code: int) -> None:
        self._file.close()
        for sink in list(self._sinks):
            self._guarded(sink, partial(sink.close, exit_code))
        self._sinks = []

    def _guarded(self, sink: Sink, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever a library raises: a view must not end the run
            self._sinks.remove(sink)
            self._warn(
                f"warning: {sink.name} failed ({type(error).__name__}: {error}) and is left out "
                "from here on; metrics.jsonl goes on"
            )


def open_sinks(folder: Path, config: RunConfig, warn: Warn) -> list[Sink]:
    """The views that a config asks for. Their packages must be there (`config_extras`)."""
    sinks: list[Sink] = []
    if config.log.tensorboard:
        from megalite.train.tensorboard_sink import TensorBoardSink

        sinks.append(TensorBoardSink(folder / "tensorboard"))
    if config.log.wandb.project is not None:
        from megalite.train.wandb_sink import WandbSink

        sinks.append(WandbSink(config.log.wandb, folder, config.name, warn))
    return sinks


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line under the names that views show: `train/loss`, `perf/mfu`,
    `memory/memory_peak_bytes`, `eval/NAME/loss`, `train/grad_norms/GROUP`,
    `train/param_stats/PARAMETER/rms`. Lines without numbers to plot give none.
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
    for name, value in numbers.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + name, value
