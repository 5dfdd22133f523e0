"""Bytes judged as documents: each is text, or a named fault in its place.

A text file or a parquet row is one document, a JSONL line is one. Every byte is accounted for: what
is not given as text is given as a fault. Reading files is in sources.py, what to do about faults in
corpus.py. Line ends inside a text are kept; blank lines between JSONL records hold no document.

A fault's first line is its name, by which it is counted; a second one, if any, is for messages.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from pydantic_core import from_json

MAX_DOCUMENT_BYTES = 64 << 20  # a file, line or row; encoding one takes some 43 times its size
BOM = "\ufeff"

FAULTS = {
    "too long": f"a document may have at most {MAX_DOCUMENT_BYTES} bytes: split it",
    "invalid UTF-8": "text must be UTF-8",
    "byte order mark": "text must not start with U+FEFF",
    "broken JSON": "a line must be one whole JSON object",
    "JSON beyond limits": "numbers may have 4300 digits, and nesting about 1000 levels",
    "not a JSON object": "a line must be a JSON object that holds the text under a key",
    "missing key": "each document must have the key that holds the text (--key)",
    "null": "the text must be a string, not null",
    "not a string": "the text must be a string",
    "empty": "a document must hold more than white space",
    "NUL": "text must not hold U+0000; this is usually binary data or UTF-16",
    "lone surrogate": "text must not hold half of a surrogate pair; it has no UTF-8 form",
}
CRLF = "CRLF line ends"
NO_LAST_NEWLINE = "no newline at the end of the file"
MAX_PLACES = 20  # places kept for a report; counts are complete
MAX_KEYS, MAX_KEY_CHARS = 10, 40  # of a document, in a message
MAX_COMPARED_KEYS = 1000  # with the one that is missing


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents of a source as bytes that nobody has looked at.

    "lines": `payload` is whole lines of the file `path`, numbered from `first`. "texts": `payload`
    is documents of `sizes` bytes one after another, at `places`; `faults` (by position) stand for
    those that could not be read. `source_bytes` counts what was read of the files, for progress.
    """

    kind: Literal["lines", "texts"]
    payload: bytes
    path: str = ""
    first: int = 1
    sizes: tuple[int, ...] = ()
    places: tuple[str, ...] = ()
    faults: dict[int, str] = field(default_factory=dict)
    source_bytes: int = 0

    def place(self, index: int) -> str:
        """ "file" or "file:line" of a document."""
        return f"{self.path}:{self.first + index}" if self.kind == "lines" else self.places[index]

    def header(self) -> dict[str, Any]:
        """Everything but the payload and the progress, for JSON."""
        return {
            "kind": self.kind,
            "path": self.path,
            "first": self.first,
            "sizes": self.sizes,
            "places": self.places,
            "faults": sorted(self.faults.items()),
        }

    @classmethod
    def from_header(cls, header: dict[str, Any], payload: bytes) -> Chunk:
        """The chunk that `header` was made of."""
        return cls(
            header["kind"],
            payload,
            header["path"],
            header["first"],
            tuple(header["sizes"]),
            tuple(header["places"]),
            dict(header["faults"]),
        )

    def digest(self) -> str:
        """Short name of content and places."""
        name = hashlib.sha256(json.dumps(self.header()).encode())
        name.update(self.payload)
        return name.hexdigest()[:32]


@dataclass
class CorpusReport:
    """What a pass over documents gave, left out, and noticed."""

    num_documents: int = 0
    text_bytes: int = 0  # UTF-8 bytes of the documents given
    skipped: Counter[str] = field(default_factory=Counter)  # fault -> documents
    places: list[str] = field(default_factory=list)  # the first of them, "file:line: fault"
    noticed: Counter[str] = field(default_factory=Counter)  # harmless oddities, by name
    noticed_first: dict[str, str] = field(default_factory=dict)  # where each was met first
    reached_max_bytes: bool = False

    def skip(self, chunk: Chunk, index: int, fault: str, key: str) -> None:
        """Count one document that is left out."""
        self.skipped[fault.partition("\n")[0]] += 1
        if len(self.places) < MAX_PLACES:
            self.places.append(f"{chunk.place(index)}: {in_full(chunk, index, fault, key)}")

    def notice(self, chunk: Chunk) -> None:
        """Count what is odd about a chunk's lines and yet costs no document."""
        if chunk.kind != "lines":
            return
        if count := chunk.payload.count(b"\r\n"):
            before = chunk.payload.count(b"\n", 0, chunk.payload.index(b"\r\n"))
            self._notice(CRLF, count, chunk.place(before))
        if not chunk.payload.endswith(b"\n"):
            self._notice(NO_LAST_NEWLINE, 1, chunk.place(chunk.payload.count(b"\n")))

    def _notice(self, name: str, count: int, place: str) -> None:
        self.noticed[name] += count
        self.noticed_first.setdefault(name, place)

    def add(self, later: CorpusReport) -> None:
        """Take in the report of the documents that follow."""
        self.num_documents += later.num_documents
        self.text_bytes += later.text_bytes
        self.skipped.update(later.skipped)
        self.places = (self.places + later.places)[:MAX_PLACES]
        self.noticed.update(later.noticed)
        self.noticed_first = {**later.noticed_first, **self.noticed_first}
        self.reached_max_bytes |= later.reached_max_bytes


def missing_key(key: str) -> str:
    """The fault of a document without the key that should hold its text."""
    return f"missing key {key!r}"


def keys_there(key: str, there: Iterable[str]) -> str:
    """Which keys there are instead, and the one that `key` may stand for; short for any input."""
    names = list(there)
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


def in_full(chunk: Chunk, index: int, fault: str, key: str) -> str:
    """A fault with what a message adds to its name. Reads the document again."""
    if chunk.kind == "lines" and fault == missing_key(key):
        record, _ = _parsed(chunk.payload.split(b"\n", index + 1)[index])
        fault = f"{fault}\n{keys_there(key, record)}"
    return fault.replace("\n", "; ")


def reason(fault: str) -> str:
    """What is wrong about a fault, for a message."""
    return next(why for name, why in FAULTS.items() if fault.startswith(name))


def parse(chunk: Chunk, key: str) -> Iterator[tuple[int, str, str]]:
    """(index, text, fault) of each document in order; `chunk.place(index)` says where it is."""
    if chunk.kind == "lines":
        for index, line in enumerate(chunk.payload.split(b"\n")):
            if line and not line.isspace():
                yield index, *_record(line, key)
        return
    at = 0
    for index, size in enumerate(chunk.sizes):
        fault = chunk.faults.get(index)
        yield index, *(("", fault) if fault else _decoded(chunk.payload[at : at + size]))
        at += size


def _decoded(content: bytes) -> tuple[str, str]:
    if len(content) > MAX_DOCUMENT_BYTES:
        return "", "too long"
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return "", "invalid UTF-8"
    return _judged(text)


def _judged(text: str) -> tuple[str, str]:
    if text.startswith(BOM):
        return "", "byte order mark"
    if "\0" in text:
        return "", "NUL"
    if not text or text.isspace():
        return "", "empty"
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return "", "lone surrogate"
    return text, ""


def _record(line: bytes, key: str) -> tuple[str, str]:
    record, fault = _parsed(line)
    if fault:
        return "", fault
    if len(line) > MAX_DOCUMENT_BYTES:
        return "", "too long"
    if not isinstance(record, dict):
        return "", "not a JSON object"
    if key not in record:
        return "", missing_key(key)
    value = record[key]
    if value is None:
        return "", "null"
    if not isinstance(value, str):
        return "", "not a string"
    return _judged(value)


def _parsed(line: bytes) -> tuple[Any, str]:
    """(value, fault) of a line as JSON, whatever kind of value that is."""
    try:
        return from_json(line), ""  # several times faster; knows no lone surrogates, so that where
    except ValueError:  # it refuses, the standard library decides what is wrong, if anything
        text, fault = _decoded(line)
    if fault:
        return None, fault
    try:
        return json.loads(text), ""
    except json.JSONDecodeError:
        return None, "broken JSON"
    except (ValueError, RecursionError):  # a number of thousands of digits, deep nesting
        return None, "JSON beyond limits"
