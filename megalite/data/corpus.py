"""Where documents come from: a folder, one file, or `builtin`, this Python's own standard library.

A corpus yields documents as text, one at a time and in the same order each time, and keeps count of
what it left out and why. Under policy `fail` the first bad document ends the run with its place;
under `skip` bad documents are left out and reported. A file that cannot be read to its end (no
permission, damaged gzip) fails under both, as nobody can say what is missing. How a file is taken
apart is in documents.py; nothing here knows tokens.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megalite.data.documents import FAULTS, JSONL_SUFFIXES, Document, read_jsonl, read_text
from megalite.errors import DataError

Policy = Literal["fail", "skip"]
BUILTIN = "builtin"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
DEFAULT_SUFFIXES = TEXT_SUFFIXES + JSONL_SUFFIXES
PIECE_CHARS = 6_000  # documents of the built-in corpus are about as long
MAX_PLACES = 20  # places kept for the report; counts are complete
# tests hold files that are broken on purpose; the rest is not the standard library
BUILTIN_LEFT_OUT = ("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test")


@dataclass
class CorpusReport:
    """What one pass over a corpus gave and left out."""

    num_documents: int = 0
    text_bytes: int = 0  # UTF-8 bytes of the documents given
    skipped: Counter[str] = field(default_factory=Counter)  # fault -> documents
    places: list[str] = field(default_factory=list)  # the first of them, "file:line: fault"
    reached_max_bytes: bool = False

    def skip(self, document: Document) -> None:
        self.skipped[document.fault] += 1
        if len(self.places) < MAX_PLACES:
            self.places.append(f"{document.place}: {document.fault}")


class Corpus:
    """A fixed list of files read as documents; `documents()` may be called again and again."""

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

    def size_hint_bytes(self) -> int | None:
        """About how much text there is, None where compression hides it."""
        if any(path.name.endswith(".gz") for path in self.files):
            return self.max_bytes
        total = sum(path.stat().st_size for path in self.files if path.is_file())
        return total if self.max_bytes is None else min(total, self.max_bytes)

    def documents(self, report: CorpusReport | None = None) -> Iterator[str]:
        """Good documents in order, counted into `report`; DataError as the policy says, or if none.

        With `max_bytes` it ends there, the last document cut at a character.
        """
        report = CorpusReport() if report is None else report
        for document in self._read_all():
            if document.fault:
                self._bad(document, report)
                continue
            text = self._within_limit(document.text, report)
            if text:
                report.num_documents += 1
                report.text_bytes += len(text.encode())
                yield text
            if report.reached_max_bytes:
                break
        if not report.num_documents:
            raise self._nothing(report)

    def _within_limit(self, text: str, report: CorpusReport) -> str:
        if self.max_bytes is None:
            return text
        content, room = text.encode(), self.max_bytes - report.text_bytes
        if len(content) <= room:
            return text
        report.reached_max_bytes = True
        cut = content[:room].decode(errors="ignore")  # what is ignored is half a character
        return "" if cut.isspace() else cut

    def _nothing(self, report: CorpusReport) -> DataError:
        if report.reached_max_bytes:
            return DataError(
                f"{self.description}: max_bytes={self.max_bytes} leaves no text of the first "
                "document; raise --max-bytes"
            )
        left_out = ", ".join(f"{fault}: {count}" for fault, count in report.skipped.items())
        return DataError(
            f"{self.description}: holds no document (left out: {left_out or 'none'}); "
            "check the source, --key and --suffix"
        )

    def _read_all(self) -> Iterator[Document]:
        for path in self.files:
            if path.name.endswith(JSONL_SUFFIXES):
                yield from read_jsonl(path, self.key)
            else:
                yield read_text(path)

    def _bad(self, document: Document, report: CorpusReport) -> None:
        if self.policy == "fail":
            raise DataError(
                f"{document.place}: {document.fault}; {FAULTS[document.fault]}. "
                "Mend it, or leave such documents out with --policy skip"
            )
        report.skip(document)


class BuiltinCorpus(Corpus):
    """The standard library's files, cut at blank lines into documents of about `PIECE_CHARS`, in
    order by hash: any stretch of it is a fair sample of the whole, so that a cut by bytes, or a
    validation split at the end, is like the rest. Reads all files (some 12 MB) before the first.
    """

    def _read_all(self) -> Iterator[Document]:
        good: list[tuple[bytes, Document]] = []
        for document in super()._read_all():
            if document.fault:
                yield document
                continue
            for number, text in enumerate(_pieces(document.text)):
                place = f"{Path(document.place).name}/{number}/{len(document.text)}"
                key = hashlib.sha256(f"{place}/{text}".encode()).digest()
                good.append((key, Document(place=document.place, text=text)))
        for _, document in sorted(good, key=lambda entry: entry[0]):
            yield document


def _pieces(text: str) -> Iterator[str]:
    """Consecutive parts of a text, of `PIECE_CHARS` or more but the last, cut at blank lines."""
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

    `policy` defaults to fail, and to skip for builtin, whose files are not the user's to mend.
    `suffixes` chooses the files of a folder. DataError when there is nothing to read.
    """
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
    """Files below a folder, sorted by their path parts, so that every machine agrees."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be listed: {error.strerror}") from error

    found = []
    for where, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not left_out(name)]
        found += [Path(where, name) for name in names if wanted(name)]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)
