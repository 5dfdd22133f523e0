"""The terminal or file behind standard output and standard error. Imports no torch."""

from __future__ import annotations

import contextlib
import io
import os
import sys

_SHOW_CURSOR = b"\x1b[?25h"


def replace_unencodable() -> None:
    """From now on print what an output's encoding lacks as an escape, instead of an exception."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook has another one
            stream.reconfigure(errors="backslashreplace")


def show_cursor() -> None:
    """Show the terminal's cursor, which a progress bar hides, if this process writes to one."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # the terminal may be gone
            if os.isatty(descriptor):
                os.write(descriptor, _SHOW_CURSOR)
