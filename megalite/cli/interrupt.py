"""What a verb that can be continued does when it is interrupted: says so, and exits with 75."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

INTERRUPTED_EXIT = 75  # as `megalite train`: come again


@contextmanager
def continuable(folder: Path) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the verb in order; a line names `folder` where work was kept in it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("error: interrupted; no dataset was made", err=True)
        _tell(folder)
        raise typer.Exit(INTERRUPTED_EXIT) from None
    except Exception:
        _tell(folder)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(folder: Path) -> None:
    if folder.is_dir():
        typer.echo(f"note: what was done is kept in {folder}; the same command goes on", err=True)
