"""The changes that saving makes to the file system, one method each.

Saving goes through one `Disk`, so tests can stop or fail it at any single step. Reading does not
use it, as it changes nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import BinaryIO


class Disk:
    """The real file system. All methods raise OSError."""

    def make_dir(self, path: Path) -> None:
        """Create a directory and its parents."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing; it must not exist."""
        return path.open("xb", buffering=0)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Write all of `data` at the end of the file."""
        view = memoryview(data)
        while view:  # an unbuffered write may take only a part
            view = view[file.write(view) :]

    def sync_file(self, file: BinaryIO) -> None:
        """Return when the file's content is on stable storage."""
        os.fsync(file.fileno())

    def sync_dir(self, path: Path) -> None:
        """Return when the directory's entries (names of its files) are on stable storage."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # some network file systems cannot sync a directory and need not
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or directory atomically; a file replaces one that has the name."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file, or a directory with all it contains."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def write_file(self, path: Path, data: bytes) -> None:
        """Create a file with this content and sync it."""
        with self.create(path) as file:
            self.write(file, data)
            self.sync_file(file)
