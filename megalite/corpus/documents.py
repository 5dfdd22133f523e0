"""Bytes checked as documents: each becomes text, or a fault with its place.

A text file or a parquet row is one document, a JSONL line is one. Every byte is accounted for: a
document that is not given as text is given as a `Fault`. sources.py reads the files, corpus.py
decides what to do about faults. Line ends inside a text are kept; blank lines between JSONL records
hold no document, and a byte order mark before a record is passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

# The largest file, line or row. Encoding a document takes up to ENCODING_FACTOR times its size, all
# but a few times of it in sentencepiece (30 to 57 times, by tokenizer and text), which takes a text
# whole: cut in two it may have other ids. So a document takes at most 4 GiB.
MAX_DOCUMENT_BYTES = 64 << 20
ENCODING_FACTOR = 64
BOM = "\ufeff"
BOM_BYTES = BOM.encode()

MISSING_KEY = "missing key"
EMPTY_FILE = "empty file"

# kind of fault -> the rule that the document breaks
FAULTS = {
    "too long": f"a document may have at most {MAX_DOCUMENT_BYTES} bytes: split it",
    "invalid UTF-8": "text must be UTF-8, or given by its encoding (--encoding utf-16, cp1252 ...)",
    "wrong encoding": "text must be in the encoding that is given (--encoding)",
    "broken JSON": "a line must be one whole JSON object",
    "JSON beyond limits": "numbers may have 4300 digits, and nesting about 1000 levels",
    "not a JSON object": "a line must be a JSON object that holds the text under a key",
    MISSING_KEY: "each document must have the key that holds the text (--key)",
    "null": "the text must be a string, not null",
    "not a string": "the text must be a string",
    "empty": "a document must hold more than white space",
    EMPTY_FILE: "a file must hold more than white space; such files are left out and counted",
    "NUL": "text must not hold U+0000; this is usually binary data or UTF-16",
    "lone surrogate": "text must not hold half of a surrogate pair; it has no UTF-8 form",
}
# the first bytes of a file -> its kind, for a message
FIRST_BYTES = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"PAR1": "parquet",
    b"PK\x03\x04": "zip",
    b"%PDF-": "PDF",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
BOM_DROPPED = "byte order mark dropped"
CRLF = "CRLF line ends"
NO_LAST_NEWLINE = "no newline at the end of the file"
MAX_PLACES = 20  # places kept for a report; counts are complete
MAX_KEYS, MAX_KEY_CHARS = 10, 40  # of a document, in a message
MAX_COMPARED_KEYS = 1000  # compared with the missing key, to suggest one


@dataclass(frozen=True)
class Fault:
    """The reason why a document cannot be used; `key`: the one that is missing."""

    kind: str  # a key of FAULTS
    key: str | None = None
    detail: str = ""  # only for messages

    @property
    def name(self) -> str:
        """The name that faults are counted by."""
        return self.kind if self.key is None else f"{self.kind} {self.key!r}"

    def __str__(self) -> str:
        return f"{self.name}; {self.detail}" if self.detail else self.name


class Document(NamedTuple):
    """One document of a chunk: its number there, and its text, or an empty text and its fault."""

    number: int
    text: str
    fault: Fault | None


@dataclass(frozen=True)
class CorpusChunk:
    """Consecutive whole documents of a corpus as bytes, not checked yet.

    "lines": `payload` is whole lines of the file `path`, numbered from `first`. "texts": `payload`
    is documents of `sizes` bytes one after another, at `places`; `faults` (by position) are those
    of documents that could not be read. `source_bytes`: bytes of the files read so far, for
    progress.
    """

    kind: Literal["lines", "texts"]
    payload: bytes
    path: str = ""
    first: int = 1
    sizes: tuple[int, ...] = ()
    places: tuple[str, ...] = ()
    faults: dict[int, Fault] = field(default_factory=dict)
    source_bytes: int = 0

    def place(self, index: int) -> str:
        """The place of a document: "file" or "file:line"."""
        return f"{self.path}:{self.first + index}" if self.kind == "lines" else self.places[index]

    def file(self, index: int) -> str:
        """The file of a document."""
        return self.path if self.kind == "lines" else self.places[index].partition(":row ")[0]

    def digest(self) -> str:
        """Hash of content and places, 32 hex digits: unfinished runs are continued by it."""
        faults = [(index, *astuple(fault)) for index, fault in sorted(self.faults.items())]
        header = [self.kind, self.path, self.first, self.sizes, self.places, faults]
        digest = hashlib.sha256(json.dumps(header).encode())
        digest.update(self.payload)
        return digest.hexdigest()[:32]


@dataclass
class CorpusReport:
    """The counts of a pass over documents: given, left out, and odd."""

    num_documents: int = 0
    text_bytes: int = 0  # UTF-8 bytes of the documents given
    skipped: Counter[str] = field(default_factory=Counter)  # name of a fault -> documents
    places: list[str] = field(default_factory=list)  # the first of them, "file:line: fault"
    noticed: Counter[str] = field(default_factory=Counter)  # harmless oddities, by name
    noticed_first: dict[str, str] = field(default_factory=dict)  # the place of the first of each
    reached_max_bytes: bool = False

    def skip(self, chunk: CorpusChunk, index: int, fault: Fault, key: str) -> None:
        """Count one document that is left out."""
        self.skipped[fault.name] += 1
        if len(self.places) < MAX_PLACES:
            self.places.append(f"{chunk.place(index)}: {with_detail(chunk, index, fault, key)}")

    def notice(self, chunk: CorpusChunk) -> None:
        """Count oddities of a chunk's lines for which no document is left out."""
        if chunk.kind != "lines":
            return
        if chunk.payload.startswith(BOM_BYTES):
            self.notice_at(BOM_DROPPED, chunk.place(0))
        for name, pattern in ((BOM_DROPPED, b"\n" + BOM_BYTES), (CRLF, b"\r\n")):
            if count := chunk.payload.count(pattern):
                line = chunk.payload.count(b"\n", 0, chunk.payload.index(pattern) + 1)
                self.notice_at(name, chunk.place(line), count)
        if not chunk.payload.endswith(b"\n"):
            self.notice_at(NO_LAST_NEWLINE, chunk.place(chunk.payload.count(b"\n")))

    def notice_at(self, name: str, place: str, count: int = 1) -> None:
        """Count oddities of one name, the first of them at `place`."""
        self.noticed[name] += count
        self.noticed_first.setdefault(name, place)

    def add(self, later: CorpusReport) -> None:
        """Add the report of the documents that follow."""
        self.num_documents += later.num_documents
        self.text_bytes += later.text_bytes
        self.skipped.update(later.skipped)
        self.places = (self.places + later.places)[:MAX_PLACES]
        self.noticed.update(later.noticed)
        self.noticed_first = {**later.noticed_first, **self.noticed_first}
        self.reached_max_bytes |= later.reached_max_bytes


def missing_key(key: str, present: Iterable[str] | None = None) -> Fault:
    """The fault of a document without the key that should hold its text.

    With the keys that are `present` its detail lists them.
    """
    return Fault(MISSING_KEY, key, "" if present is None else _describe_keys(key, present))


def _describe_keys(key: str, present: Iterable[str]) -> str:
    """The keys that are present, and the one that `key` may stand for; short for any input."""
    names = list(present)
    if not names:
        return "it has no keys"
    compared = (name for name in names[:MAX_COMPARED_KEYS] if len(name) <= MAX_KEY_CHARS)
    lower = {name.lower(): name for name in compared}
    near = get_close_matches(key[:MAX_KEY_CHARS].lower(), lower, n=1)
    shown = [
        repr(name if len(name) <= MAX_KEY_CHARS else f"{name[:MAX_KEY_CHARS]}...")
        for name in names[:MAX_KEYS]
    ]
    more = f" and {len(names) - MAX_KEYS:,} more" if len(names) > MAX_KEYS else ""
    meant = f" (did you mean {lower[near[0]]!r}?)" if near else ""
    return f"it has {', '.join(shown)}{more}{meant}"


def with_detail(chunk: CorpusChunk, index: int, fault: Fault, key: str) -> Fault:
    """The fault of a document with its detail for a message.

    The keys of a JSONL record are found by parsing it again: most faults are only counted.
    """
    if chunk.kind == "lines" and fault == missing_key(key):
        record, _ = _parse_json(chunk.payload.split(b"\n", index + 1)[index])
        return missing_key(key, record)
    return fault


def parse(chunk: CorpusChunk, key: str) -> Iterator[Document]:
    """The documents of a chunk in order; `chunk.place(number)` is the place of each.

    A text may begin with byte order marks.
    """
    if chunk.kind == "lines":
        for index, line in enumerate(chunk.payload.split(b"\n")):
            if line and not line.isspace():
                text, fault = _check_record(line, key)
                yield Document(index, text, fault)
        return
    start = 0
    for index, size in enumerate(chunk.sizes):
        text, fault = "", chunk.faults.get(index)
        if fault is None:
            text, fault = _check_bytes(chunk.payload[start : start + size])
        yield Document(index, text, fault)
        start += size


def _check_bytes(content: bytes) -> tuple[str, Fault | None]:
    """(text, fault) of a document's bytes."""
    if len(content) > MAX_DOCUMENT_BYTES:
        return "", Fault("too long")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return "", Fault("invalid UTF-8", detail=_describe_start(content))
    text, fault = _check_text(text)
    if fault is not None and fault.kind == "NUL":
        return "", Fault("NUL", detail=_describe_start(content))
    return text, fault


def kind_by_first_bytes(content: bytes) -> str:
    """The kind of file that begins with such bytes, if it is one of FIRST_BYTES, or ""."""
    return next((kind for start, kind in FIRST_BYTES.items() if content.startswith(start)), "")


def _describe_start(content: bytes) -> str:
    kind = kind_by_first_bytes(content)
    return f"its first bytes are those of {kind}" if kind else ""


def _check_text(text: str) -> tuple[str, Fault | None]:
    """(text, fault) of a document's text."""
    if "\0" in text:
        return "", Fault("NUL")
    plain = text.lstrip(BOM)
    if not plain or plain.isspace():
        return "", Fault("empty")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return "", Fault("lone surrogate")
    return text, None


def _check_record(line: bytes, key: str) -> tuple[str, Fault | None]:
    """(text, fault) of a JSONL line."""
    record, fault = _parse_json(line)
    if fault is not None:
        return "", fault
    if len(line) > MAX_DOCUMENT_BYTES:
        return "", Fault("too long")
    if not isinstance(record, dict):
        return "", Fault("not a JSON object")
    if key not in record:
        return "", missing_key(key)
    value = record[key]
    if value is None:
        return "", Fault("null")
    if not isinstance(value, str):
        return "", Fault("not a string")
    return _check_text(value)


def _parse_json(line: bytes) -> tuple[Any, Fault | None]:
    """(value, fault) of a line as JSON; the value may be of any kind."""
    # pydantic's parser is several times faster than the standard library's, but refuses some valid
    # JSON (lone surrogates). So the standard library decides about what it refuses.
    line = line.removeprefix(BOM_BYTES)
    try:
        return from_json(line), None
    except ValueError:
        text, fault = _check_bytes(line)
    if fault is not None:
        return None, fault
    try:
        return json.loads(text), None
    except json.JSONDecodeError:
        return None, Fault("broken JSON")
    except (ValueError, RecursionError):  # a number of thousands of digits, deep nesting
        return None, Fault("JSON beyond limits")
