"""Reading files as chunks of documents: text files, JSON lines (plain, gzip, zstandard), parquet.

A chunk holds about CHUNK_BYTES in whole documents, or one longer document; how a file is cut
depends on its content alone. Memory: a chunk, at most one document of MAX_DOCUMENT_BYTES. A file
that cannot be read to its end is a DataError. documents.py checks the text.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Protocol

from megalite.corpus.documents import MAX_DOCUMENT_BYTES, CorpusChunk, Fault
from megalite.corpus.parquet import read_parquet
from megalite.errors import DataError

CHUNK_BYTES = 1 << 20
LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")
PARQUET_SUFFIXES = (".parquet",)


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_files(files: Iterable[Path], key: str) -> Iterator[CorpusChunk]:
    """Chunks of all files in order; neighbouring text files share chunks. Suffixes decide kinds."""
    done_bytes = 0
    texts = TextChunks()
    for path in files:
        if path.name.endswith(LINES_SUFFIXES + PARQUET_SUFFIXES):
            yield from texts.flush(done_bytes)
            yield from _read_one(path, key, done_bytes)
        else:
            content, fault = _read_text(path)
            yield from texts.add(str(path), content, done_bytes + len(content), fault)
        done_bytes += _size(path)
    yield from texts.flush(done_bytes)


class TextChunks:
    """Gathers documents that come one by one, from text files or rows, into chunks."""

    def __init__(self) -> None:
        self._clear()

    def add(
        self, place: str, content: bytes, done_bytes: int, fault: Fault | None = None
    ) -> Iterator[CorpusChunk]:
        """Add one document; yields a chunk once there is enough for one."""
        if fault is not None:
            self._faults[len(self._places)] = fault
        self._places.append(place)
        self._contents.append(content)
        self._bytes += len(content)
        if self._bytes >= CHUNK_BYTES or len(self._places) >= CHUNK_BYTES >> 6:
            yield from self.flush(done_bytes)

    def flush(self, done_bytes: int) -> Iterator[CorpusChunk]:
        """Yield the documents that are left, if any, as a chunk."""
        if self._places:
            yield CorpusChunk(
                "texts",
                b"".join(self._contents),
                sizes=tuple(map(len, self._contents)),
                places=tuple(self._places),
                faults=self._faults,
                source_bytes=done_bytes,
            )
        self._clear()

    def _clear(self) -> None:
        self._places: list[str] = []
        self._contents: list[bytes] = []
        self._faults: dict[int, Fault] = {}
        self._bytes = 0


def _read_one(path: Path, key: str, before_bytes: int) -> Iterator[CorpusChunk]:
    """Chunks of a parquet or JSONL file; `before_bytes`: sizes of the files before it."""
    try:
        if path.name.endswith(PARQUET_SUFFIXES):
            texts = TextChunks()
            for place, content, fault, done_bytes in read_parquet(path, key):
                yield from texts.add(place, content, before_bytes + done_bytes, fault)
            yield from texts.flush(before_bytes + _size(path))
        else:
            with path.open("rb") as raw:
                if path.suffix in (".gz", ".zst") and not _size(path):
                    raise EOFError("it is empty, which no compressed file is")
                for chunk in cut_lines(_decompressed(path, raw), str(path)):
                    # The place in the compressed file: its size is known, that of the text is not.
                    yield replace(chunk, source_bytes=before_bytes + raw.tell())
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"{path}: cannot be read to its end: {reason}; no policy covers this, as what is "
            "missing is unknown: copy the file again or remove it"
        ) from error


def _decompressed(path: Path, raw: IO[bytes]) -> _Stream:
    if path.name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if path.name.endswith(".zst"):
        stream: _Stream = _pyarrow(path).input_stream(raw, compression="zstd")
        return stream
    return raw


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{path}: zstandard files need pyarrow, which is not installed: "
            "pip install pyarrow, or decompress the file"
        ) from error
    return pyarrow


def cut_lines(stream: _Stream, path: str) -> Iterator[CorpusChunk]:
    """Chunks of whole lines of about CHUNK_BYTES; a line over MAX_DOCUMENT_BYTES is a fault."""
    first, kept = 1, bytearray()  # number of the line that `kept` begins, and its bytes so far
    while block := _read_whole(stream, max(CHUNK_BYTES - len(kept), CHUNK_BYTES >> 2)):
        end = block.rfind(b"\n") + 1
        if end:
            payload = bytes(kept + block[:end])
            yield CorpusChunk("lines", payload, path, first)
            first += payload.count(b"\n")
            kept = bytearray(block[end:])
        else:
            kept += block
            if len(kept) > MAX_DOCUMENT_BYTES:
                yield CorpusChunk(
                    "texts",
                    b"",
                    sizes=(0,),
                    places=(f"{path}:{first}",),
                    faults={0: Fault("too long")},
                )
                first += 1

                # The rest of the line is dropped. The block in which it ends may hold whole lines,
                # and the beginning of another one.
                rest = _skip_line(stream)
                end = rest.rfind(b"\n") + 1
                if end:
                    yield CorpusChunk("lines", rest[:end], path, first)
                    first += rest.count(b"\n")
                kept = bytearray(rest[end:])
    if kept:
        yield CorpusChunk("lines", bytes(kept), path, first)


def _skip_line(stream: _Stream) -> bytes:
    """Read to the end of the current line; returns what follows it in the last block read."""
    while block := _read_whole(stream, CHUNK_BYTES):
        _, newline, rest = block.partition(b"\n")
        if newline:
            return rest
    return b""


def _read_whole(stream: _Stream, size: int) -> bytes:
    """Read `size` bytes, fewer only at the end; one read of a decompressor may give fewer."""
    parts = []
    while size and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _read_text(path: Path) -> tuple[bytes, Fault | None]:
    """(content, fault) of a whole file as one document; DataError if it cannot be read."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; no policy covers this, as what is missing "
            "is unknown: give the right to read it, or remove it"
        ) from error
    if len(content) > MAX_DOCUMENT_BYTES:
        return b"", Fault("too long")
    return content, None


def _size(path: Path) -> int:
    """Bytes of a file; 0 for a pipe and the like, whose size is not known."""
    return path.stat().st_size if path.is_file() else 0
