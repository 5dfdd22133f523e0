"""What a verb that can be continued does when it is interrupted: says so, and exits with 75."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from megalite.errors import MegaliteError

INTERRUPTED_EXIT = 75  # as `megalite train`: come again


@contextmanager
def continuable() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the verb in order; a line tells what an error's notes say of work that
    was kept."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo("error: interrupted; no dataset was made", err=True)
        _tell(error)
        raise typer.Exit(INTERRUPTED_EXIT) from None
    except MegaliteError as error:
        _tell(error)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        typer.echo(f"note: {note}", err=True)
