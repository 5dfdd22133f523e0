"""Publishing a dataset: its index written in bounded memory, its files renamed, the index last.

An interruption at any moment leaves nothing that can be opened as a dataset. Used by the writer,
prepare and merge.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed import CODES, HEADER, MAGIC, VERSION, byte_offsets, file_of
from megalite.errors import DataError, cannot_write

ENTRIES_AT_ONCE = 1 << 20  # of an index's tables in memory
SUFFIXES = (".bin", ".idx", ".json", ".mask", ".model")


def check_prefix(prefix: str | Path) -> None:
    """Raise DataError for a prefix at which files can evidently not be made."""
    if Path(prefix).is_dir() or str(prefix).endswith(("/", ".bin", ".idx")):
        raise DataError(
            f"output prefix {prefix} is a folder or a file name; "
            "give the path that .bin and .idx are appended to, such as data/train"
        )
    for suffix in SUFFIXES:
        if (path := file_of(prefix, suffix)).is_dir():
            raise DataError(f"{path} is a folder, in the way of a file; give another --out")


def require_free(prefix: str) -> None:
    """Raise DataError if a dataset exists at a prefix."""
    if file_of(prefix, ".idx").exists():
        raise DataError(
            f"{prefix}.idx exists, and runs that use this dataset would lose it; choose another "
            "name, or replace it with --overwrite"
        )


@contextmanager
def write_errors_as_data_errors(out_prefix: str) -> Iterator[None]:
    """Context manager: an OSError inside becomes a DataError that the disk cannot be written.

    Errors in reading are not affected: the readers raise DataError themselves.
    """
    try:
        yield
    except OSError as error:
        text = cannot_write(error.filename or out_prefix, error, "give another place")
        raise DataError(f"{text}. Nothing was made") from error


def write_index(
    path: Path,
    dtype: np.dtype[Any],
    lengths: NDArray[np.int32],
    documents: NDArray[np.int64] | None = None,
    modes: NDArray[np.int8] | None = None,
) -> None:
    """Write an .idx file and wait until it is on disk; see data/indexed.py for the format.

    `lengths` [N] in tokens, `documents` [D] boundaries as sequence indices, `modes` [N]. Without
    `documents` each sequence is a document. Arrays may be memory maps of any size: ENTRIES_AT_ONCE
    are in memory.
    """
    count = len(lengths)
    boundaries = count + 1 if documents is None else len(documents)
    starts = range(0, count, ENTRIES_AT_ONCE)
    with path.open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], count, boundaries))
        for at in starts:
            stream.write(lengths[at : at + ENTRIES_AT_ONCE].astype("<i4").tobytes())

        # The tables follow one another in the file, so the lengths are read a second time here.
        done_bytes = 0
        for at in starts:
            part = np.asarray(lengths[at : at + ENTRIES_AT_ONCE])
            offsets = byte_offsets(part, dtype.itemsize) + np.int64(done_bytes)
            stream.write(offsets.astype("<i8").tobytes())
            done_bytes = int(offsets[-1]) + int(part[-1]) * dtype.itemsize

        for at in range(0, boundaries, ENTRIES_AT_ONCE):
            stop = min(at + ENTRIES_AT_ONCE, boundaries)
            some = np.arange(at, stop) if documents is None else documents[at:stop]
            stream.write(some.astype("<i8").tobytes())
        if modes is not None:
            stream.write(np.asarray(modes).astype("<i1").tobytes())
        sync(stream)


def publish_files(prefix: Path, made: Mapping[str, Path]) -> None:
    """Rename finished files (suffix -> path) to PREFIX + suffix, the .idx last.

    An old .idx is deleted first: at no moment may an index lie beside data of another dataset.
    """
    file_of(prefix, ".idx").unlink(missing_ok=True)
    for suffix in {".json", ".mask"} - made.keys():  # they describe the old dataset
        file_of(prefix, suffix).unlink(missing_ok=True)
    for suffix, path in made.items():
        if suffix != ".idx":
            os.replace(path, file_of(prefix, suffix))
    os.replace(made[".idx"], file_of(prefix, ".idx"))
    sync_folder(prefix.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as stream:
        stream.write(content)
        sync(stream)


def sync(stream: IO[bytes]) -> None:
    """Wait until what was written is on disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until renames in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
