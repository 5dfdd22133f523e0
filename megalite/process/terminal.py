"""The terminal, file or pipe behind each standard stream. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from megalite.errors import EXIT_FAULT, EXIT_USER, cannot_write

_SHOW_CURSOR = b"\x1b[?25h"


def replace_unencodable() -> None:
    """From now on print what an output's encoding lacks as an escape, instead of an exception."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook has another one
            stream.reconfigure(errors="backslashreplace")


def open_closed() -> None:
    """Open the null device in the place of each standard stream that is closed, as by `>&-`.

    Otherwise the next file that is opened gets its number, and what is printed there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def discard_output() -> None:
    """From now on write standard output to nowhere, also what is flushed at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


class _OutputError(OSError):
    """Standard output cannot be written."""


class _Output(io.FileIO):
    """The file of standard output. An error in writing it is told from that of another file."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _OutputError(error.errno, error.strerror) from None


@contextlib.contextmanager
def reported_output() -> Iterator[None]:
    """Within it and at exit, output that cannot be written is a line on stderr and EXIT_USER.

    Where the reader of a pipe is gone, as behind `| head`, the process ends by EXIT_FAULT, quietly.
    """
    stdout = sys.stdout
    buffer = getattr(stdout, "buffer", None)  # of python -u it is the file itself
    if isinstance(stdout, io.TextIOWrapper) and isinstance(
        getattr(buffer, "raw", buffer), io.FileIO
    ):
        file = _Output(stdout.fileno(), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(
            file if stdout.write_through else io.BufferedWriter(file),
            stdout.encoding,
            stdout.errors,
            line_buffering=stdout.line_buffering,
            write_through=stdout.write_through,
        )
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except _OutputError as error:
        discard_output()
        if error.errno == errno.EPIPE:
            sys.exit(EXIT_FAULT)
        problem = cannot_write("standard output", error, "write it to another place")
        with contextlib.suppress(OSError):  # stderr may be on the same disk
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(EXIT_USER)


def show_cursor() -> None:
    """Show the terminal's cursor, which a progress bar hides, if this process writes to one."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # the terminal may be gone
            if os.isatty(descriptor):
                os.write(descriptor, _SHOW_CURSOR)
