"""Messages whose remedy follows from an error's number."""

from __future__ import annotations

import errno
import os

import pytest

from megalite.errors import cannot_write


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room or give another --out"),
        (errno.EDQUOT, "make room or give another --out"),
        (errno.EACCES, "get the right to write there or give another --out"),
        (errno.EIO, "see the system's log about the storage or give another --out"),
        (errno.ESTALE, "see the system's log about the storage or give another --out"),
        (errno.EROFS, "give another --out"),
        (errno.ENOTDIR, "give another --out"),
    ],
)
def test_the_number_decides_what_to_do(number: int, remedy: str) -> None:
    error = OSError(number, os.strerror(number))
    text = cannot_write("out.bin", error, "give another --out")
    assert text == f"out.bin cannot be written: {os.strerror(number)}; {remedy}"


def test_without_another_place() -> None:
    text = cannot_write("x", OSError(errno.ENOSPC, "full"))
    assert text == "x cannot be written: full; make room"
    assert cannot_write("x", OSError(errno.ENOTDIR, "no")) == "x cannot be written: no"
