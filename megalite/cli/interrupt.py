"""The end of a verb that is interrupted: a message and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from megalite.process.signals import SignalFlag


@contextmanager
def interruptible(what: str, code: int) -> Iterator[None]:
    """Within it the first signal raises KeyboardInterrupt, so that cleanup runs; see SignalFlag.

    An interruption is reported on stderr: that no `what` was made, with the notes of the exception
    (the work that is kept). It ends the process with `code`. A second signal ends it at once, also
    while a library has the main thread.
    """
    try:
        with SignalFlag("cleans up and leaves", interrupts=True) as flag:
            flag.listen()
            try:
                yield
            except KeyboardInterrupt:
                flag.ignore()  # leaving may take a second, and `code` stays
                raise
    except KeyboardInterrupt as error:
        typer.echo(f"error: interrupted; no {what} was made", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(f"note: {note}", err=True)
        raise typer.Exit(code) from None
