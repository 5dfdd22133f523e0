"""The end of a verb that is interrupted and can be continued: a message, and exit code 75."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from megalite.errors import EXIT_SAVED


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it SIGTERM and Ctrl-C raise KeyboardInterrupt, so that cleanup runs.

    An interruption is reported on stderr, with the notes of the exception (the work that is kept),
    and ends the process with EXIT_SAVED.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo("error: interrupted; no dataset was made", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(f"note: {note}", err=True)
        raise typer.Exit(EXIT_SAVED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
