"""What a verb that can be continued does when it is interrupted: says so, and exits with 75."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

INTERRUPTED_EXIT = 75  # as `megalite train`: come again


@contextmanager
def continuable() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the verb in order; lines say so, and what work is kept."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo("error: interrupted; no dataset was made", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(f"note: {note}", err=True)
        raise typer.Exit(INTERRUPTED_EXIT) from None
    finally:
        signal.signal(signal.SIGTERM, before)
