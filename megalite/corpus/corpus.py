"""The sources of documents: a folder, one file, or `builtin`, this Python's standard library.

A corpus yields documents in the same order each time, as chunks of bytes or as text, and counts
those that it left out, by fault. Under policy `fail` the first bad document is a DataError with its
place, and those of the files behind it; under `skip` bad documents are left out and reported. A
file that cannot be read to its end (no permission, damaged gzip), or is not what it is named, is a
DataError under both, as what is missing is unknown. Empty text files and byte order marks are left
out and counted. sources.py reads files, documents.py defines the faults; tokens come later.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal

from megalite.corpus.documents import (
    BOM,
    BOM_DROPPED,
    EMPTY_FILE,
    FAULTS,
    MAX_PLACES,
    CorpusChunk,
    CorpusReport,
    Document,
    Fault,
    Form,
    TextForm,
    parse,
    with_detail,
)
from megalite.corpus.sources import (
    JSON_SUFFIXES,
    LINES_SUFFIXES,
    PACKED_SUFFIXES,
    UTF8,
    TextChunks,
    file_bytes,
    read_files,
    require_kinds,
)
from megalite.corpus.tables import TABLE_SUFFIXES
from megalite.errors import DataError

Policy = Literal["fail", "skip"]
BUILTIN = "builtin"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
RECORD_SUFFIXES = (*LINES_SUFFIXES, *TABLE_SUFFIXES)
KNOWN_SUFFIXES = (*TEXT_SUFFIXES, *RECORD_SUFFIXES, *JSON_SUFFIXES)
LOOK_AHEAD_BYTES = 256 << 20  # of text behind a bad document, searched for more of them
MAX_KINDS = 8  # of files left out, in a message
PIECE_CHARS = 6_000  # length of documents of the built-in corpus, about
# Folders that the built-in corpus leaves out: tests hold files that are broken on purpose; the
# others are not the standard library.
BUILTIN_LEFT_OUT = ("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test")


@dataclass
class Corpus:
    """A fixed list of files read as documents; `documents()` may be called repeatedly."""

    description: str
    files: list[Path]
    policy: Policy
    form: Form = TextForm()  # noqa: RUF009 (frozen)
    max_bytes: int | None = None
    encoding: str = UTF8
    selection: str = ""  # the kinds of files of a folder that are taken and left out

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes < 1:
            raise DataError(
                f"max_bytes={self.max_bytes}; must be 1 or more bytes of text, or left out"
            )
        if self.policy not in ("fail", "skip"):
            raise DataError(f"policy={self.policy!r}; must be 'fail' or 'skip'")
        try:
            "x".encode(self.encoding)  # not all codecs are of text
            self.encoding = codecs.lookup(self.encoding).name
        except (LookupError, UnicodeError) as error:
            raise DataError(
                f"encoding={self.encoding!r}: {error}; give one that Python knows, such as cp1252, "
                "latin-1, utf-16, shift_jis"
            ) from None
        require_kinds(self.files, self.encoding)

    def source_bytes(self) -> int:
        """Bytes of all files on disk, the final value of `CorpusChunk.source_bytes`."""
        return sum(map(file_bytes, self.files))

    def chunks(self) -> Iterator[CorpusChunk]:
        """The whole corpus as bytes, in order, not limited by `max_bytes`."""
        return read_files(self.files, self.form, self.encoding)

    def documents(
        self,
        report: CorpusReport | None = None,
        on_chunk: Callable[[CorpusChunk], None] = lambda chunk: None,
    ) -> Iterator[str]:
        """The good documents in order, counted into `report`.

        With `max_bytes` it ends there, the last document cut at a character. `on_chunk` is called
        before the documents of each chunk. Raises DataError for a bad document under policy
        `fail`, and if there is no good document.
        """
        report = CorpusReport() if report is None else report
        for chunk in self.chunks():
            on_chunk(chunk)
            try:
                options = (self.form, self.policy, self.max_bytes)
                for document in accepted_documents(chunk, report, *options):
                    yield document.text
            except DataError as error:
                raise self.refusal(chunk, str(error)) from None
            if report.reached_max_bytes:
                break
        self.require_some(report)

    def refusal(self, chunk: CorpusChunk, first: str) -> DataError:
        """The error for a chunk whose `first` bad document was found, with those behind it.

        Looks through the chunk and LOOK_AHEAD_BYTES of the files that begin after it, and names one
        document of each file. With `max_bytes` it is not known whether those would be read.
        """
        if self.max_bytes is not None:
            return DataError(first)

        # The rest of the source may take hours to read, and the user waits for this message.
        faults: Counter[str] = Counter()
        named: dict[str, str] = {}  # file -> its first bad document
        seen_bytes, saw_all = 0, False
        with suppress(DataError):  # a file that cannot be read ends the search
            for each in chain([chunk], self._chunks_behind(chunk)):
                for index, _, _, fault in parse(each, self.form):
                    if fault is not None and fault.kind != EMPTY_FILE:
                        faults[fault.name] += 1
                        named.setdefault(each.file(index), f"{each.place(index)}: {fault}")
                seen_bytes += len(each.payload)
                if seen_bytes > LOOK_AHEAD_BYTES:
                    break
            else:
                saw_all = True

        if faults.total() < 2:
            return DataError(first)
        counts = ", ".join(f"{name}: {count:,}" for name, count in sorted(faults.items()))
        at_least = "" if saw_all else "at least "
        whole = f"bad documents: {at_least}{faults.total():,}, in files: {len(named):,} ({counts})"
        return DataError("\n".join([first, *list(named.values())[1:MAX_PLACES], whole]))

    def _chunks_behind(self, chunk: CorpusChunk) -> Iterator[CorpusChunk]:
        """Chunks of the files that begin after a chunk."""
        begins = accumulate(map(file_bytes, self.files), initial=0)
        pairs = zip(self.files, begins, strict=False)
        behind = [path for path, begin in pairs if begin >= chunk.source_bytes]
        return read_files(behind, self.form, self.encoding)

    def require_some(self, report: CorpusReport) -> None:
        """Raise DataError if no document was found."""
        if report.num_documents:
            return
        if report.reached_max_bytes:
            raise DataError(
                f"{self.description}: max_bytes={self.max_bytes} leaves no text of the first "
                "document; raise --max-bytes"
            )
        counts = {**report.skipped, **report.noticed}
        left_out = ", ".join(f"{name}: {count}" for name, count in counts.items())
        first = f"the first at {report.places[0]}; " if report.places else ""
        raise DataError(
            f"{self.description}: holds no document (left out: {left_out or 'none'}); "
            f"{first}check the source, --key and --suffix"
        )


def accepted_documents(
    chunk: CorpusChunk, report: CorpusReport, form: Form, policy: Policy, max_bytes: int | None
) -> Iterator[Document]:
    """The good documents of a chunk, counted into `report`.

    `max_bytes` limits the text in `report`, that of earlier chunks included; a text may be cut
    there, a conversation is left out. Raises DataError at the first bad document under policy
    `fail`.
    """
    report.notice(chunk)
    for index, text, trained, fault in parse(chunk, form):
        if fault is not None:
            if fault.kind == EMPTY_FILE:
                report.notice_at(EMPTY_FILE, chunk.place(index))
            elif policy == "fail":
                detailed = with_detail(chunk, index, fault)
                raise DataError(
                    f"{chunk.place(index)}: {detailed}; {FAULTS[fault.kind]}. "
                    "Mend it, or leave such documents out with --on-bad skip"
                )
            else:
                report.skip(chunk, index, fault)
            continue

        if trained is None and text.startswith(BOM):
            report.notice_at(BOM_DROPPED, chunk.place(index))
            text = text.lstrip(BOM)

        # Counted before it is given: the caller may stop after any document.
        size = len(text) if text.isascii() else len(text.encode())
        if max_bytes is not None and size > max_bytes - report.text_bytes:
            report.reached_max_bytes = True
            left = max_bytes - report.text_bytes
            text = _first_bytes(text, left) if trained is None else ""
            size = len(text.encode())
        if text:
            report.num_documents += 1
            report.text_bytes += size
            yield Document(index, text, trained, None)
        if report.reached_max_bytes:
            return


def _first_bytes(text: str, limit_bytes: int) -> str:
    """The first whole characters of a text in at most `limit_bytes`; "" if only white space."""
    cut = text.encode()[:limit_bytes].decode(errors="ignore")  # drops a part of a character
    return "" if cut.isspace() else cut


class BuiltinCorpus(Corpus):
    """The standard library's files, cut at blank lines into documents of about `PIECE_CHARS`.

    They are in order by hash: any stretch is a fair sample of the whole, so a cut by bytes, or a
    validation split at the end, is like the rest. All files (some 12 MB) are read before the first
    document is given.
    """

    def _chunks_behind(self, chunk: CorpusChunk) -> Iterator[CorpusChunk]:
        """No chunks: the first one has all the faults."""
        return iter(())

    def chunks(self) -> Iterator[CorpusChunk]:
        """The faults, then the pieces of all files in order by hash."""
        texts = TextChunks()
        bad: list[tuple[str, Fault]] = []  # (place, fault)
        good: list[tuple[bytes, str, str]] = []  # (hash, place, text)
        for chunk in super().chunks():
            for index, text, _, fault in parse(chunk, self.form):
                place = chunk.place(index)
                if fault is not None:
                    bad.append((place, fault))
                    continue
                # Without the folder, which differs between machines. The number and the length of
                # the file keep equal pieces of it apart.
                for number, piece in enumerate(_pieces(text)):
                    name = f"{Path(place).name}/{number}/{len(text)}/{piece}"
                    good.append((hashlib.sha256(name.encode()).digest(), place, piece))

        # Progress: a share of the files' bytes, by characters given.
        total, done, size = sum(len(piece) for _, _, piece in good), 0, self.source_bytes()
        for place, fault in bad:
            yield from texts.add(place, b"", 0, fault)
        for _, place, piece in sorted(good, key=lambda entry: entry[0]):
            done += len(piece)
            yield from texts.add(place, piece.encode(), size * done // max(total, 1))
        yield from texts.flush(size)


def _pieces(text: str) -> Iterator[str]:
    """Consecutive parts of a text, cut at blank lines; `PIECE_CHARS` or more, but for the last."""
    kept: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        kept.append(line)
        size += len(line)
        if size >= PIECE_CHARS and line.isspace():
            yield "".join(kept)
            kept, size = [], 0
    if kept and not "".join(kept).isspace():
        yield "".join(kept)


def open_corpus(
    source: str,
    *,
    key: str | Form = "text",
    policy: Policy | None = None,
    max_bytes: int | None = None,
    suffixes: Sequence[str] | None = None,
    encoding: str = UTF8,
) -> Corpus:
    """The corpus that `source` names: a folder, a text or JSONL file, or the word builtin.

    A file without a suffix is a text if it is the source itself; a folder's need a suffix.
    `key` holds the text of a record, or is another form of documents. `policy` defaults to fail, to
    skip for builtin, whose files the user cannot correct. `suffixes` chooses the files of a folder,
    `encoding` is that of texts and of lines. Raises DataError if there is nothing to read, or a
    file is not what its name says.
    """
    # The word wins over a folder or a file of that name, which ./builtin reaches.
    form: Form = TextForm(key) if isinstance(key, str) else key
    path = Path(source)
    if source != BUILTIN and path.is_dir():
        files, selection = _folder_files(path, suffixes)
        options = (form, max_bytes, encoding, selection)
        return Corpus(f"folder {source}", files, policy or "fail", *options)
    if suffixes:
        raise DataError(f"suffixes={list(suffixes)} choose files of a folder; {source} is none")
    if source == BUILTIN:
        if encoding != UTF8:
            raise DataError(f"encoding={encoding!r} has no effect on builtin, which is {UTF8}")
        name = f"builtin: standard library of Python {platform.python_version()}"
        return BuiltinCorpus(name, _builtin_files(), policy or "skip", form, max_bytes)

    if not path.is_file():
        raise DataError(f"{source}: no such file or folder; give one, or the word {BUILTIN}")
    if path.suffix and not path.name.lower().endswith(KNOWN_SUFFIXES):
        raise DataError(
            f"{source}: file of unknown kind; wanted a name without a suffix (one text), or one "
            f"ending in {', '.join(KNOWN_SUFFIXES)}: rename it or convert it to JSONL"
        )
    return Corpus(f"file {source}", [path], policy or "fail", form, max_bytes, encoding)


def _folder_files(folder: Path, suffixes: Sequence[str] | None) -> tuple[list[Path], str]:
    """The files of a folder that are taken, and a line about these and the ones left out.

    By default JSON lines and tables, or else text: beside records, texts are rather about them
    (README.md, LICENSE.txt). A .json is taken by request only, as most hold settings.
    """
    saved = _saved_files(folder)
    if saved is not None and not suffixes:  # maps may have left caches beside these
        return saved, f"{_count_kinds(saved)}, as state.json of `datasets` lists them"
    files, num_hidden = _walk(folder, lambda name: name.startswith("."))
    if suffixes:
        wanted = tuple(suffix.lower() for suffix in suffixes)
    else:
        has_records = any(_ends(path, RECORD_SUFFIXES) for path in files)
        wanted = RECORD_SUFFIXES if has_records else TEXT_SUFFIXES
    taken = [path for path in files if _ends(path, wanted)]
    left = [path for path in files if not _ends(path, wanted)]

    left_out = f"left out {len(left):,}: {_count_kinds(left)}; --suffix takes them" if left else ""
    hidden = f"{num_hidden:,} hidden names left out" if num_hidden else ""
    if not taken:
        raise DataError(
            "; ".join(
                filter(
                    None,
                    (
                        f"{folder}: holds no file ending in {', '.join(wanted)}",
                        left_out,
                        hidden,
                        "choose others with --suffix, or give another folder",
                    ),
                )
            )
        )
    return taken, "; ".join(filter(None, (_count_kinds(taken), left_out, hidden)))


def _saved_files(folder: Path) -> list[Path] | None:
    """The files of a folder that `save_to_disk` of `datasets` made; None for any other folder.

    Raises DataError for one with several splits, or with an order that is not in the files.
    """
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    try:
        if splits.is_file():
            names = json.loads(splits.read_bytes())["splits"]
            raise DataError(
                f"{folder}: holds the splits {', '.join(names)} of a data set; give one of them, "
                f"such as {folder / names[0]}"
            )
        values = json.loads(state.read_bytes()) if state.is_file() else {}
        if not isinstance(values, dict) or "_data_files" not in values:
            return None
        if values.get("_indices_data_files"):
            raise DataError(
                f"{folder}: was saved with an order of rows beside its files (_indices_data_files "
                "of state.json); load it, call flatten_indices(), and save it again"
            )
        return [folder / entry["filename"] for entry in values["_data_files"]]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder}: {state.name} cannot be read: {error}") from error


def _ends(path: Path, suffixes: tuple[str, ...]) -> bool:
    return path.name.lower().endswith(suffixes)


def _count_kinds(files: Sequence[Path]) -> str:
    """Numbers of files by suffix, the most frequent first: ".jsonl.gz 12, .md 1"."""
    kinds: Counter[str] = Counter()
    for path in files:
        name, packed = path.name.lower(), path.suffix.lower()
        inner = Path(name).with_suffix("").suffix if packed in PACKED_SUFFIXES else ""
        kinds[f"{inner}{packed}" or "no suffix"] += 1
    ordered = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{kind} {count:,}" for kind, count in ordered[:MAX_KINDS]]
    if more := sum(count for _, count in ordered[MAX_KINDS:]):
        shown.append(f"others {more:,}")
    return ", ".join(shown)


def _builtin_files() -> list[Path]:
    files, _ = _walk(Path(sysconfig.get_path("stdlib")), BUILTIN_LEFT_OUT.__contains__)
    sources = [path for path in files if path.name.endswith(".py")]
    if not sources:
        raise DataError(
            "builtin: this Python comes without the sources of its standard library; "
            "give a folder or a JSONL file instead"
        )
    return sources


def _walk(folder: Path, left_out: Callable[[str], bool]) -> tuple[list[Path], int]:
    """The files below a folder, and the number of names (of folders, too) that are left out.

    They are sorted by the parts of their paths: the same on every machine.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be listed: {error.strerror}") from error

    found, num_left_out = [], 0
    for where, folders, names in os.walk(folder, onerror=refuse):
        kept = [name for name in folders if not left_out(name)]
        files = [Path(where, name) for name in names if not left_out(name)]
        num_left_out += len(folders) + len(names) - len(kept) - len(files)
        folders[:] = kept
        found += files
    return sorted(found, key=lambda path: path.relative_to(folder).parts), num_left_out
