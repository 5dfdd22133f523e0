"""Files taken apart into documents, each either text or a named fault with its place.

A text file is one document, a JSONL line is one document. Every byte is accounted for: what is not
given as text is given as a fault. What to do about faults is corpus.py's business. Line ends inside
a text are kept as they are; blank lines between JSONL records hold no document.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megalite.errors import DataError

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_DOCUMENT_BYTES = 256 << 20  # a file or line; bounds memory
BOM = "\ufeff"

FAULTS = {
    "too long": f"a document may have at most {MAX_DOCUMENT_BYTES} bytes: split it",
    "invalid UTF-8": "text must be UTF-8",
    "byte order mark": "text must not start with U+FEFF",
    "broken JSON": "a line must be one whole JSON object",
    "not a JSON object": "a line must be a JSON object that holds the text under a key",
    "missing key": "the object must have the key that holds the text (--key)",
    "null": "the text must be a string, not null",
    "not a string": "the text must be a string",
    "empty": "a document must hold more than white space",
    "NUL": "text must not hold U+0000; this is usually binary data or UTF-16",
    "lone surrogate": "text must not hold half of a surrogate pair; it has no UTF-8 form",
}


@dataclass(frozen=True)
class Document:
    """One document's text, or the fault (a key of FAULTS) that stands in its place."""

    place: str  # "file" or "file:line"
    text: str = ""
    fault: str = ""


def read_text(path: Path) -> Document:
    """A whole file as one document."""
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            return Document(str(path), fault="too long")
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from error
    return _decoded(content, str(path))


def read_jsonl(path: Path, key: str) -> Iterator[Document]:
    """Each line's text under `key`, from a plain or gzip file (by its name)."""
    try:
        with _open(path) as stream:
            for number, line in _lines(stream):
                place = f"{path}:{number}"
                if line is None:
                    yield Document(place, fault="too long")
                elif line.strip():
                    yield _parsed(_decoded(line, place), key)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, str(error)) from error


def _open(path: Path) -> BinaryIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _unreadable(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path}: cannot be read to its end: {reason}; "
        "no policy covers this, as what is missing is unknown: copy the file again or remove it"
    )


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines, None for one that is too long (which is read past, not kept)."""
    number = 0
    while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
        number += 1
        if len(line) <= MAX_DOCUMENT_BYTES:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(1 << 20)
        yield number, None


def _decoded(content: bytes, place: str) -> Document:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return Document(place, fault="invalid UTF-8")
    return _judged(text, place)


def _judged(text: str, place: str) -> Document:
    if text.startswith(BOM):
        return Document(place, fault="byte order mark")
    if "\0" in text:
        return Document(place, fault="NUL")
    if not text or text.isspace():
        return Document(place, fault="empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return Document(place, fault="lone surrogate")
    return Document(place, text)


def _parsed(line: Document, key: str) -> Document:
    if line.fault:
        return line
    try:
        record = json.loads(line.text)
    except (ValueError, RecursionError):
        return Document(line.place, fault="broken JSON")
    if not isinstance(record, dict):
        return Document(line.place, fault="not a JSON object")
    if key not in record:
        return Document(line.place, fault="missing key")
    if record[key] is None:
        return Document(line.place, fault="null")
    if not isinstance(record[key], str):
        return Document(line.place, fault="not a string")
    return _judged(record[key], line.place)
