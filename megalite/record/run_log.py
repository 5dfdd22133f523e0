"""A run's log: its folder and lock, metrics.jsonl with its views, log.txt, the console.

Rank 0 opens it. On the other ranks, and before that, its methods do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from megalite.config import RunConfig
from megalite.config.text import to_toml
from megalite.errors import ConfigError, MegaliteError, cannot_write
from megalite.record.console import Console
from megalite.record.metrics import Device
from megalite.record.records import lock_folder
from megalite.record.sinks import Recorder
from megalite.record.step_lines import StepLines


class RunLog:
    """Writes the events of a run: to metrics.jsonl and its views, to log.txt and the console."""

    def __init__(self, folder: Path, config: RunConfig, device: Device, console: Console) -> None:
        self._folder, self._config, self._device = folder, config, device
        self._console = console
        self._lock: TextIO | None = None
        self._recorder: Recorder | None = None
        self._lines = StepLines(config, device, 0)

    @property
    def is_open(self) -> bool:
        return self._recorder is not None

    def lock(self) -> None:
        """Lock the run folder if there is one, so that no other run saves there from now on.

        Raises ConfigError where it is in use or cannot be written.
        """
        if self._lock is None and self._folder.is_dir():
            with self._writing():
                self._lock = lock_folder(self._folder, self._console.print)

    def open(
        self, step: int, total_steps: int, first: dict[str, Any], lines: Sequence[str]
    ) -> None:
        """Lock the run folder and begin: the `run` or `restart` line, and lines for the console.

        Raises ConfigError where the folder is in use or cannot be written.
        """
        with self._writing():
            self._folder.mkdir(parents=True, exist_ok=True)
            self.lock()
            (self._folder / "config.toml").write_text(to_toml(self._config), encoding="utf-8")
            self._recorder = Recorder(self._folder, self._config, self._console.print)
            self._console.open_log(self._folder / "log.txt")
        kind = "run" if self._recorder.attempt == 1 else "restart"
        self._recorder.write(kind, step=step, **first)
        self._lines = StepLines(self._config, self._device, total_steps)
        for line in lines:
            self._console.print(line)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Within it an OSError is a ConfigError about the run folder."""
        try:
            yield
        except OSError as error:
            text = cannot_write(f"run folder {self._folder}", error, "change out or name")
            raise ConfigError(text) from error

    def print(self, line: str) -> None:
        """A line for the console and log.txt."""
        self._console.print(line)

    def evaluations(self, step: int) -> dict[str, float]:
        """The losses of validation sets that this or an earlier attempt wrote for a step."""
        return {} if self._recorder is None else self._recorder.evaluations(step)

    def step(self, line: dict[str, Any], skipped: bool, done: int) -> None:
        """A step's record; `done` is how far the run is on its progress bar."""
        if self._recorder is None:
            return
        self._recorder.write("step", **line)
        text = self._lines.step(line, skipped)
        if text is not None:
            self._console.print(text)
        self._console.advance(done)

    def skip(self, step: int, reason: str, text: str, count: int, loss_scale: float) -> None:
        """A step whose update was skipped, the `count`-th one for this reason."""
        if self._recorder is None:
            return
        self._recorder.write("skip", step=step, reason=reason, count=count, loss_scale=loss_scale)
        self._console.print(f"step {step}: {text}")

    def evaluation(self, step: int, name: str, loss: float, tokens: int) -> None:
        """The loss of a validation set after a step."""
        if self._recorder is None:
            return
        self._recorder.write("eval", step=step, name=name, loss=loss, tokens=tokens)
        self._console.print(self._lines.evaluation(step, name, loss, tokens))

    def checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """A checkpoint that was written."""
        if self._recorder is None:
            return
        self._recorder.write("checkpoint", step=step, path=str(path), seconds=seconds)
        self._console.print(f"step {step:5d}: saved {path} in {seconds:.1f} s")

    def fail(self, step: int, reason: str, exit_code: int) -> None:
        """The end of a run by an error. Raises nothing: a full disk must not hide the error."""
        with contextlib.suppress(OSError, MegaliteError):
            if self._recorder is not None:
                self._console.record(f"failed at step {step}: {reason}")
            self.close(step, reason, exit_code)

    def close(self, step: int, reason: str, exit_code: int) -> None:
        """The end of a run; the folder is free for the next attempt."""
        if self._recorder is not None:
            self._recorder.write("end", step=step, reason=reason, exit_code=exit_code)
            self._recorder.close(exit_code)
            self._recorder = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
