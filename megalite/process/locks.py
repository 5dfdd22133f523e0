"""A lock on a file, which keeps a second process out of a folder. Imports no torch."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

# Of a file system that has no locks, or not on this mount: Lustre, NFS, FUSE.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def lock_file(path: Path, warn: Callable[[str], object]) -> TextIO:
    """Create and lock a file, until the result is closed or this process ends.

    Where the file system has no locks the file is not locked, with one warning. Raises
    BlockingIOError if another process has locked it, OSError if it cannot be created.
    """
    file = path.open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
        warn(
            f"warning: {path} cannot be locked ({error.strerror}): this file system has no locks; "
            f"nothing keeps a second run out of {path.parent}"
        )
    return file
