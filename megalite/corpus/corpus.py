"""The sources of documents: a folder, one file, or `builtin`, this Python's standard library.

A corpus yields documents in the same order each time, as chunks of bytes or as text, and counts
those that it left out, by fault. Under policy `fail` the first bad document is a DataError with its
place; under `skip` bad documents are left out and reported. A file that cannot be read to its end
(no permission, damaged gzip) is a DataError under both, as what is missing is unknown. sources.py
reads files, documents.py defines the faults; tokens come later.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from megalite.corpus.documents import CorpusChunk, CorpusReport, Fault, parse, with_detail
from megalite.corpus.sources import LINES_SUFFIXES, PARQUET_SUFFIXES, TextChunks, read_files
from megalite.errors import DataError

Policy = Literal["fail", "skip"]
BUILTIN = "builtin"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
DEFAULT_SUFFIXES = TEXT_SUFFIXES + LINES_SUFFIXES + PARQUET_SUFFIXES
PIECE_CHARS = 6_000  # length of documents of the built-in corpus, about
# Folders that the built-in corpus leaves out: tests hold files that are broken on purpose; the
# others are not the standard library.
BUILTIN_LEFT_OUT = ("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test")


class Corpus:
    """A fixed list of files read as documents; `documents()` may be called repeatedly."""

    def __init__(
        self,
        description: str,
        files: Sequence[Path],
        policy: Policy,
        key: str = "text",
        max_bytes: int | None = None,
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise DataError(f"max_bytes={max_bytes}; must be 1 or more bytes of text, or left out")
        if policy not in ("fail", "skip"):
            raise DataError(f"policy={policy!r}; must be 'fail' or 'skip'")
        self.description = description
        self.files = list(files)
        self.policy = policy
        self.key = key
        self.max_bytes = max_bytes

    def source_bytes(self) -> int:
        """Bytes of all files on disk, the final value of `CorpusChunk.source_bytes`."""
        return sum(path.stat().st_size for path in self.files if path.is_file())

    def chunks(self) -> Iterator[CorpusChunk]:
        """The whole corpus as bytes, in order, not limited by `max_bytes`."""
        return read_files(self.files, self.key)

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
            yield from self.texts(chunk, report)
            if report.reached_max_bytes:
                break
        self.require_some(report)

    def texts(self, chunk: CorpusChunk, report: CorpusReport) -> Iterator[str]:
        """The good documents of one chunk; `report` has those before it and counts these, too."""
        return accepted_texts(chunk, report, self.key, self.policy, self.max_bytes)

    def require_some(self, report: CorpusReport) -> None:
        """Raise DataError if no document was found."""
        if report.num_documents:
            return
        if report.reached_max_bytes:
            raise DataError(
                f"{self.description}: max_bytes={self.max_bytes} leaves no text of the first "
                "document; raise --max-bytes"
            )
        left_out = ", ".join(f"{fault}: {count}" for fault, count in report.skipped.items())
        first = f"the first at {report.places[0]}; " if report.places else ""
        raise DataError(
            f"{self.description}: holds no document (left out: {left_out or 'none'}); "
            f"{first}check the source, --key and --suffix"
        )


def accepted_texts(
    chunk: CorpusChunk, report: CorpusReport, key: str, policy: Policy, max_bytes: int | None
) -> Iterator[str]:
    """The good documents of a chunk, counted into `report`.

    `max_bytes` limits the text in `report`, that of earlier chunks included. Raises DataError at
    the first bad document under policy `fail`.
    """
    report.notice(chunk)
    for index, text, fault in parse(chunk, key):
        if fault is not None:
            if policy == "fail":
                raise DataError(
                    f"{chunk.place(index)}: {with_detail(chunk, index, fault, key)}; {fault.rule}. "
                    "Mend it, or leave such documents out with --on-bad skip"
                )
            report.skip(chunk, index, fault, key)
            continue

        # Counted before it is given: the caller may stop after any document.
        size = len(text) if text.isascii() else len(text.encode())
        if max_bytes is not None and size > max_bytes - report.text_bytes:
            report.reached_max_bytes = True
            text = _first_bytes(text, max_bytes - report.text_bytes)
            size = len(text.encode())
        if text:
            report.num_documents += 1
            report.text_bytes += size
            yield text
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

    def chunks(self) -> Iterator[CorpusChunk]:
        """The faults, then the pieces of all files in order by hash."""
        texts = TextChunks()
        bad: list[tuple[str, Fault]] = []  # (place, fault)
        good: list[tuple[bytes, str, str]] = []  # (hash, place, text)
        for chunk in super().chunks():
            for index, text, fault in parse(chunk, self.key):
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
    key: str = "text",
    policy: Policy | None = None,
    max_bytes: int | None = None,
    suffixes: Sequence[str] | None = None,
) -> Corpus:
    """The corpus that `source` names: a folder, a text or JSONL file, or the word builtin.

    `policy` defaults to fail, and to skip for builtin, whose files the user cannot correct.
    `suffixes` chooses the files of a folder. Raises DataError if there is nothing to read.
    """
    # The word wins over a folder or a file of that name, which ./builtin reaches.
    if source != BUILTIN and Path(source).is_dir():
        files = _folder_files(Path(source), tuple(suffixes or DEFAULT_SUFFIXES))
        return Corpus(f"folder {source}", files, policy or "fail", key, max_bytes)
    if suffixes:
        raise DataError(f"suffixes={list(suffixes)} choose files of a folder; {source} is none")
    if source == BUILTIN:
        name = f"builtin: standard library of Python {platform.python_version()}"
        return BuiltinCorpus(name, _builtin_files(), policy or "skip", key, max_bytes)

    path = Path(source)
    if not path.is_file():
        raise DataError(f"{source}: no such file or folder; give one, or the word {BUILTIN}")
    if not path.name.endswith(DEFAULT_SUFFIXES):
        raise DataError(
            f"{source}: file of unknown kind; wanted a name ending in "
            f"{', '.join(DEFAULT_SUFFIXES)}: rename it or convert it to JSONL"
        )
    return Corpus(f"file {source}", [path], policy or "fail", key, max_bytes)


def _folder_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    def wanted(name: str) -> bool:
        return not name.startswith(".") and name.endswith(suffixes)

    files = _walk(folder, wanted, lambda name: name.startswith("."))
    if not files:
        raise DataError(
            f"{folder}: holds no file ending in {', '.join(suffixes)}; "
            "choose others with --suffix, or give another folder"
        )
    return files


def _builtin_files() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = _walk(folder, lambda name: name.endswith(".py"), BUILTIN_LEFT_OUT.__contains__)
    if not files:
        raise DataError(
            "builtin: this Python comes without the sources of its standard library; "
            "give a folder or a JSONL file instead"
        )
    return files


def _walk(
    folder: Path, wanted: Callable[[str], bool], left_out: Callable[[str], bool]
) -> list[Path]:
    """The files below a folder, sorted by the parts of their paths: the same on every machine."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be listed: {error.strerror}") from error

    found = []
    for where, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not left_out(name)]
        found += [Path(where, name) for name in names if wanted(name)]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)
