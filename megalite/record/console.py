"""The output for a person: lines, and on a terminal a progress bar with the time left.

Only rank 0 prints; every line also goes to the run's log.txt. Does not handle metrics.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from megalite.process.secrets import Redaction
from megalite.process.terminal import discard_output

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress, TaskID


class _Stdout:
    """Standard output as it is at each call. One that cannot be written is replaced by nothing.

    A terminal may be closed under a run, and a pipe lose its reader: neither ends the run.
    """

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        self._on_loss = on_loss

    def __getattr__(self, name: str) -> Any:
        if name == "rich_proxied_file":  # where rich would write instead
            raise AttributeError(name)
        return getattr(self._file, name)

    @property
    def _file(self) -> TextIO:
        # While a bar is shown, rich has put something of its own in the place of standard output.
        file: TextIO = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
        return file

    def write(self, text: str) -> None:
        self._guarded(lambda: self._file.write(text))

    def flush(self) -> None:
        self._guarded(self._file.flush)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            discard_output()
            self._on_loss(f"warning: standard output is gone ({error.strerror}); log.txt goes on")


class Console:
    """Prints lines to standard output and log.txt; with `quiet` (all ranks but 0) does nothing."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._log: TextIO | None = None
        self._early: list[str] = []  # lines from before the log was opened
        self._bar: tuple[Progress, TaskID] | None = None
        self._hide = Redaction()

    @cached_property
    def _rich(self) -> RichConsole:
        """rich, imported by the one rank of a run that prints."""
        from rich.console import Console

        stdout = cast(TextIO, _Stdout(self.record))
        return Console(file=stdout, highlight=False, soft_wrap=True)

    def open_log(self, path: Path) -> None:
        """Append all lines to `path`: those printed until now, and from now on each at once."""
        if self.quiet:
            return
        self._log = path.open("a", encoding="utf-8")
        for line in self._early:
            self._log.write(line + "\n")
        self._early.clear()

    def print(self, line: str) -> None:
        """Print and log one line of plain text, without the keys and tokens of the environment."""
        if self.quiet:
            return
        line = self._hide(line)
        # While a bar is shown only its own console can print above it.
        console = self._bar[0].console if self._bar else self._rich
        console.print(line, markup=False)
        self.record(line)

    def record(self, line: str) -> None:
        """Write one line to log.txt alone."""
        if self.quiet:
            return
        line = self._hide(line)
        if self._log is None:
            self._early.append(line)
        else:
            self._log.write(line + "\n")
            self._log.flush()

    @contextmanager
    def progress(self, done: int, total: int) -> Iterator[None]:
        """Show a bar over `total` steps while active, if this is a terminal."""
        if self.quiet or not self._rich.is_terminal:
            yield
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._rich, transient=True) as bar:
            self._bar = (bar, bar.add_task("training", total=total, completed=done))
            try:
                yield
            finally:
                self._bar = None

    def advance(self, done: int) -> None:
        """Set the bar to `done` steps, if one is shown."""
        if self._bar is not None:
            self._bar[0].update(self._bar[1], completed=done)

    def close(self) -> None:
        """Close log.txt."""
        if self._log is not None:
            self._log.close()
            self._log = None
