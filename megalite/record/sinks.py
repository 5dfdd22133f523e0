"""The outputs for a run's lines: metrics.jsonl, which is the record, and views of it.

A view (TensorBoard, wandb) gets every line after the file has it, under the names of `scalars`. A
view that fails is dropped with one warning; it never ends or delays a run. Rank 0 only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from megalite.config import RunConfig
from megalite.record.records import MetricsFile, read_lines
from megalite.record.views import Warn


class Sink(Protocol):
    """A view of the record. Whatever it raises is caught by `Recorder`."""

    name: str

    def write(self, record: dict[str, Any]) -> None:
        """Take the values of a line, with its `kind` and `attempt`."""

    def close(self, exit_code: int) -> None:
        """Write out buffered values and end; `exit_code` is the run's."""


class Recorder:
    """Writes lines to metrics.jsonl and passes them on to the views that the config asks for."""

    def __init__(self, folder: Path, config: RunConfig, warn: Warn) -> None:
        self._file = MetricsFile(folder / "metrics.jsonl")
        self._warn = warn
        self._sinks = open_sinks(folder, config, warn)

    @property
    def attempt(self) -> int:
        return self._file.attempt

    def write(self, kind: str, **values: Any) -> None:
        """Append one line. Raises MegaliteError if the file cannot be written; never for a view."""
        self._file.write(kind, **values)
        record = {"kind": kind, "attempt": self.attempt, **values}
        for sink in list(self._sinks):
            self._guarded(sink, partial(sink.write, record))

    def evaluations(self, step: int) -> dict[str, float]:
        """The loss of each validation set after a step, as the last attempt that had it wrote."""
        lines = read_lines(self._file.path).sound
        evals = [line for line in lines if line["kind"] == "eval" and line["step"] == step]
        return {str(line.get("name", "validation")): line["loss"] for line in evals}

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
    """The views that a config asks for. Their packages must be installed (`checks.packages`)."""
    sinks: list[Sink] = []
    if config.log.tensorboard:
        from megalite.record.tensorboard_sink import TensorBoardSink

        sinks.append(TensorBoardSink(folder / "tensorboard"))
    if config.log.wandb.project is not None:
        from megalite.record.wandb_sink import WandbSink

        sinks.append(WandbSink(config.log.wandb, folder, config.name, warn))
    return sinks
