"""Messages for people: the console on rank 0, warnings from every rank, and `log.txt`.

Made once and passed; there is no global logger. Numbers for machines go to the metrics, not here.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console


class Log:
    """Says things once: `info` on rank 0 only, `warning` and `error` from any rank with its number.

    `path` is the log file; rank 0 writes all of its lines there and the other ranks append their
    warnings and errors, each line in one write. A terminal gets colours through rich; anything
    else gets plain lines. `info` goes to stdout, the rest to stderr.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        path: Path | None = None,
        *,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        self._said: set[str] = set()
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def info(self, text: str) -> None:
        """A line of progress; silent on ranks other than 0."""
        if self.rank == 0:
            self._show(text, self._out, style=None)
            self._keep("", text)

    def warning(self, text: str) -> None:
        """Something the user should look at; from whichever rank it happened on."""
        self._show(f"{self._prefix()}warning: {text}", self._err, style="yellow")
        self._keep("warning: ", text)

    def warning_once(self, text: str) -> None:
        """Like `warning`, but the same text only once in a run."""
        if text not in self._said:
            self._said.add(text)
            self.warning(text)

    def error(self, text: str) -> None:
        """Why the run ends."""
        self._show(f"{self._prefix()}error: {text}", self._err, style="bold red")
        self._keep("error: ", text)

    def close(self) -> None:
        """Close the log file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prefix(self) -> str:
        return f"[rank {self.rank}] " if self.world_size > 1 else ""

    def _show(self, text: str, stream: TextIO, style: str | None) -> None:
        if stream.isatty():
            Console(file=stream, highlight=False).print(
                text, style=style, markup=False, soft_wrap=True
            )
        else:
            stream.write(f"{text}\n")
            stream.flush()

    def _keep(self, level: str, text: str) -> None:
        if self._file is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            self._file.write(f"{stamp} {self._prefix()}{level}{text}\n")
