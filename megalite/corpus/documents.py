"""Bytes checked as documents: each becomes text, or a fault with its place.

A text file or a row of a table is one document, a JSONL line is one. A `Form` says what of a record
is the document: `TextForm` a string, chat.py a conversation. Every byte is accounted for: a
document that is not given as text is given as a `Fault`. sources.py reads the files, corpus.py
decides what to do about faults. Line ends inside a text are kept; blank lines between JSONL records
hold no document, and a byte order mark before a record is passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, Protocol

from pydantic_core import from_json

from megalite.data.chat_template import Spans

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
    "not a conversation": "it must hold a list of messages, each with a role and a text "
    "(--messages, --role-key, --content-key), or a prompt and a response",
    "no assistant turn": "a conversation must hold a turn of the assistant, which is what is "
    "trained (--roles renames)",
    "special token": "text must not spell a special token of the tokenizer; --allow-special takes "
    "it as that token",
    "template": "the chat template must take the conversation",
    "prefixes differ": "a template without generation tags must render a turn in the same way "
    "whatever follows; give one with the tags (--chat-template)",
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
    b"\xff\xff\xff\xff": "Arrow",
    b"ARROW1": "Arrow",
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


class Content(NamedTuple):
    """The text of a document, and its characters to train on (None: all); or "" and its fault."""

    text: str
    trained: Spans | None
    fault: Fault | None


class Document(NamedTuple):
    """One document of a chunk: its number there, and its content."""

    number: int
    text: str
    trained: Spans | None
    fault: Fault | None


class Form(Protocol):
    """The part of a record that is the document. Forms can be pickled, for the workers."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys that a record must have."""

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """The keys that a record may have."""

    def describe(self) -> Any:
        """JSON values that differ if the same record may give another document."""

    def of_bytes(self, content: bytes) -> Content:
        """The document of a file, or of a row of a table as it was read for this form."""

    def of_record(self, record: Mapping[str, Any]) -> Content:
        """The document of a JSON object."""


@dataclass(frozen=True)
class TextForm:
    """The string under a key, or a whole file."""

    key: str = "text"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def optional_columns(self) -> tuple[str, ...]:
        return ()

    def describe(self) -> Any:
        return self.key

    def of_bytes(self, content: bytes) -> Content:
        text, fault = _check_bytes(content)
        return Content(text, None, fault)

    def of_record(self, record: Mapping[str, Any]) -> Content:
        if self.key not in record:
            return Content("", None, missing_key(self.key))
        value = record[self.key]
        if not isinstance(value, str):
            return Content("", None, Fault("null" if value is None else "not a string"))
        text, fault = check_text(value)
        return Content(text, None, fault)


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

    def skip(self, chunk: CorpusChunk, index: int, fault: Fault) -> None:
        """Count one document that is left out."""
        self.skipped[fault.name] += 1
        if len(self.places) < MAX_PLACES:
            self.places.append(f"{chunk.place(index)}: {with_detail(chunk, index, fault)}")

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


def with_detail(chunk: CorpusChunk, index: int, fault: Fault) -> Fault:
    """The fault of a document with its detail for a message.

    The keys of a JSONL record are found by parsing it again: most faults are only counted.
    """
    if chunk.kind == "lines" and fault.key is not None and not fault.detail:
        record, _ = _parse_json(chunk.payload.split(b"\n", index + 1)[index])
        return missing_key(fault.key, record)
    return fault


def parse(chunk: CorpusChunk, form: Form) -> Iterator[Document]:
    """The documents of a chunk in order; `chunk.place(number)` is the place of each.

    A text may begin with byte order marks.
    """
    if chunk.kind == "lines":
        for index, line in enumerate(chunk.payload.split(b"\n")):
            if line and not line.isspace():
                yield Document(index, *check_record(line, form))
        return
    start = 0
    for index, size in enumerate(chunk.sizes):
        content = Content("", None, chunk.faults.get(index))
        if content.fault is None:
            content = form.of_bytes(chunk.payload[start : start + size])
        yield Document(index, *content)
        start += size


def _check_bytes(content: bytes) -> tuple[str, Fault | None]:
    """(text, fault) of a document's bytes."""
    if len(content) > MAX_DOCUMENT_BYTES:
        return "", Fault("too long")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return "", Fault("invalid UTF-8", detail=_describe_start(content))
    text, fault = check_text(text)
    if fault is not None and fault.kind == "NUL":
        return "", Fault("NUL", detail=_describe_start(content))
    return text, fault


def kind_by_first_bytes(content: bytes) -> str:
    """The kind of file that begins with such bytes, if it is one of FIRST_BYTES, or ""."""
    return next((kind for start, kind in FIRST_BYTES.items() if content.startswith(start)), "")


def _describe_start(content: bytes) -> str:
    kind = kind_by_first_bytes(content)
    return f"its first bytes are those of {kind}" if kind else ""


def check_text(text: str) -> tuple[str, Fault | None]:
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


def check_record(line: bytes, form: Form) -> Content:
    """The document of a JSONL line."""
    record, fault = _parse_json(line)
    if fault is None and len(line) > MAX_DOCUMENT_BYTES:
        fault = Fault("too long")
    if fault is None and not isinstance(record, dict):
        fault = Fault("not a JSON object")
    return form.of_record(record) if fault is None else Content("", None, fault)


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
