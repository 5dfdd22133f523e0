"""Locks: a second process is kept out, and a file system without locks keeps nobody out."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from megalite.process.locks import lock_file

WITHOUT = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def test_a_second_lock_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    warnings: list[str] = []
    with lock_file(tmp_path / "lock", warnings.append), pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock", warnings.append)
    lock_file(tmp_path / "lock", warnings.append).close()
    assert warnings == []


@pytest.mark.parametrize("number", [*WITHOUT, errno.EIO, errno.EACCES])
def test_only_a_file_system_without_locks_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    warnings: list[str] = []
    path = tmp_path / "lock"
    if number not in WITHOUT:
        with pytest.raises(OSError, match=os.strerror(number)):
            lock_file(path, warnings.append)
        assert warnings == []
        return
    lock_file(path, warnings.append).close()
    assert warnings == [
        f"warning: {path} cannot be locked ({os.strerror(number)}): this file system has no locks; "
        f"nothing keeps a second run out of {tmp_path}"
    ]
