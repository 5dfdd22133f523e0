"""Reading files as chunks of documents: text files, JSON lines (plain, gzip, zstandard), tables.

A file's name says what it is, in letters of either case; `require_kinds` holds that against its
first bytes. A chunk holds about CHUNK_BYTES in whole documents, or one longer document; how a file
is cut depends on its content alone. Memory: a chunk, at most one document of MAX_DOCUMENT_BYTES.
Text in another encoding than UTF-8 is UTF-8 from here on. A file that cannot be read to its end is
a DataError. documents.py checks the text.
"""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

from megalite.corpus.documents import (
    BOM_BYTES,
    EMPTY_FILE,
    MAX_DOCUMENT_BYTES,
    MAX_PLACES,
    CorpusChunk,
    Fault,
    Form,
    kind_by_first_bytes,
)
from megalite.corpus.tables import TABLE_SUFFIXES, read_table, require_pyarrow
from megalite.errors import DataError

CHUNK_BYTES = 1 << 20
PACKED_SUFFIXES = {".gz": "gzip", ".zst": "zstandard"}
LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")
JSON_SUFFIXES = (".json", ".json.gz", ".json.zst")  # lines, too, but many hold one object
UTF8 = "utf-8"
# The beginnings of JSON that is no object a line, and what makes lines of it.
ONE_VALUE = {
    "a JSON array": (re.compile(rb"\s*\[\s*(\{|\n)"), "jq -c '.[]'"),
    "a JSON object over several lines": (re.compile(rb'\s*\{\s*\n\s*"'), "jq -c ."),
}
JSON_START = re.compile(rb'\s*(\{\s*"|\[\s*[\[{"])')
SNIFFED = 4096  # bytes


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_files(files: Iterable[Path], form: Form, encoding: str = UTF8) -> Iterator[CorpusChunk]:
    """Chunks of all files in order; neighbouring text files share chunks. Suffixes decide kinds."""
    done_bytes = 0
    texts = TextChunks()
    for path in files:
        before_bytes, done_bytes = done_bytes, done_bytes + file_bytes(path)
        if holds_records(path):
            yield from texts.flush(before_bytes)
            yield from _read_records(path, form, encoding, before_bytes)
        else:
            content, fault = _read_text(path, encoding)
            yield from texts.add(str(path), content, done_bytes, fault)
    yield from texts.flush(done_bytes)


def holds_records(path: Path) -> bool:
    """True for JSON lines and tables, by the name; any other file is one text."""
    return path.name.lower().endswith((*LINES_SUFFIXES, *JSON_SUFFIXES, *TABLE_SUFFIXES))


def require_kinds(files: Iterable[Path], encoding: str) -> None:
    """Raise DataError, naming up to MAX_PLACES of them, for files that are not what they are named.

    Only files of records, and those without a suffix that may hold some: a text file is one
    document, and bad documents have a policy.
    """
    problems = [
        f"{path}: {problem}"
        for path in files
        if (holds_records(path) or not path.suffix)
        and path.is_file()
        and (problem := _kind_problem(path, encoding))
    ]
    if problems:
        rest = len(problems) - MAX_PLACES
        more = [f"and {rest} more such files"] if rest > 0 else []
        raise DataError("\n".join([*problems[:MAX_PLACES], *more]))


def _kind_problem(path: Path, encoding: str) -> str:
    """The way in which a file's first bytes are not those that its name promises, or ""."""
    suffix = path.suffix.lower()
    named = TABLE_SUFFIXES.get(suffix) or PACKED_SUFFIXES.get(suffix, "")
    try:
        with path.open("rb") as raw:
            start = raw.read(8)
            found = kind_by_first_bytes(start)
            if named and start and found != named:
                begins = f"those of {found}" if found else "others"
                return f"named as {named}, but its first bytes are {begins}; give it its right name"
            raw.seek(0)
            if suffix in TABLE_SUFFIXES:
                return ""
            head = _text_stream(path, raw, encoding).read(SNIFFED)
    except (OSError, EOFError, UnicodeError, zlib.error):
        return ""  # the reader raises it, with what follows from it

    if not suffix:
        if not JSON_START.match(head.removeprefix(BOM_BYTES)):
            return ""
        return (
            "begins as JSON does, and its name has no suffix; name it .jsonl if each line is an "
            "object, or .txt to take it as one text"
        )
    if encoding == UTF8 and (found := kind_by_first_bytes(head)):
        remedy = "give --encoding utf-16" if found == "UTF-16" else "give it its right name"
        return f"named as lines of JSON, but its first bytes are those of {found}; {remedy}"
    for kind, (pattern, remedy) in ONE_VALUE.items():
        if pattern.match(head.removeprefix(BOM_BYTES)):
            return (
                f"holds {kind}, not an object a line; make lines of it ({remedy} FILE > "
                "FILE.jsonl), or name it .txt to take it as one text"
            )
    return ""


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


def _read_records(
    path: Path, form: Form, encoding: str, before_bytes: int
) -> Iterator[CorpusChunk]:
    """Chunks of a table or a JSONL file; `before_bytes`: sizes of the files before it."""
    try:
        if path.suffix.lower() in TABLE_SUFFIXES:
            texts = TextChunks()
            for place, content, fault, done_bytes in read_table(path, form):
                yield from texts.add(place, content, before_bytes + done_bytes, fault)
            yield from texts.flush(before_bytes + file_bytes(path))
        else:
            with path.open("rb") as raw:
                if path.suffix.lower() in PACKED_SUFFIXES and not file_bytes(path):
                    raise EOFError("it is empty, which no compressed file is")
                for chunk in cut_lines(_text_stream(path, raw, encoding), str(path)):
                    # The place in the compressed file: its size is known, that of the text is not.
                    yield replace(chunk, source_bytes=before_bytes + raw.tell())
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"{path}: cannot be read to its end: {reason}; no policy covers this, as what is "
            "missing is unknown: copy the file again or remove it"
        ) from error


def _text_stream(path: Path, raw: IO[bytes], encoding: str) -> _Stream:
    """The file's text as UTF-8, decompressed as its name says."""
    stream: _Stream = raw
    if path.suffix.lower() == ".gz":
        stream = gzip.GzipFile(fileobj=raw, mode="rb")
    elif path.suffix.lower() == ".zst":
        arrow = require_pyarrow(path, "decompress the file")
        stream = arrow.input_stream(raw, compression="zstd")
    return stream if encoding == UTF8 else _Recoded(stream, encoding)


class _Recoded:
    """A stream of text in another encoding, read as UTF-8. UnicodeError where it is not that."""

    def __init__(self, stream: _Stream, encoding: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._ready = b""

    def read(self, size: int, /) -> bytes:
        """The next `size` bytes of UTF-8, fewer only at the end: lines are cut by content alone."""
        parts = [self._ready]
        held = len(self._ready)
        while held < size:
            block = self._stream.read(size)
            parts.append(self._decoder.decode(block, final=not block).encode())
            held += len(parts[-1])
            if not block:
                break
        ready = b"".join(parts)
        self._ready = ready[size:]
        return ready[:size]


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


def _read_text(path: Path, encoding: str) -> tuple[bytes, Fault | None]:
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
    if encoding != UTF8:
        try:
            content = content.decode(encoding).encode()
        except UnicodeError:
            return b"", Fault("wrong encoding", detail=f"it is not {encoding}")
    if not content.removeprefix(BOM_BYTES).strip():
        return b"", Fault(EMPTY_FILE)
    return content, None


def file_bytes(path: Path) -> int:
    """Bytes of a file; 0 for a pipe and the like, whose size is not known."""
    return path.stat().st_size if path.is_file() else 0
