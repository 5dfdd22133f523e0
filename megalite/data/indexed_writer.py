"""Writer of Megatron's indexed dataset, see indexed.py: one sequence per document, atomic.

It publishes by renaming finished files, the index last, so that an interrupted run leaves nothing
that opens; a killed one may leave `PREFIX.*.tmp-*` files, which nothing reads. Knows no text.
"""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.fingerprint import fingerprint_files
from megalite.data.indexed import (
    CODES,
    HEADER,
    MAGIC,
    VERSION,
    byte_offsets,
    dtype_for_vocab,
    file_of,
)
from megalite.errors import DataError

MAX_SEQUENCE_TOKENS = 2**31 - 1  # lengths are stored as int32


@dataclass(frozen=True)
class Written:
    """What a writer has put into its files; known before they are published."""

    num_tokens: int
    num_documents: int
    max_id: int  # -1: no token
    dtype: str
    fingerprint: str


class IndexedWriter:
    """Writes one dataset: `add_document` for each document, then `publish`.

    Used as a context manager, it removes its temporary files unless `publish` was reached. Files
    of an earlier dataset under the same prefix stay as they are until then, and are replaced.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.dtype = dtype_for_vocab(vocab_size)
        self.num_tokens = 0
        self.max_id = -1
        self._lengths = array("i")
        self._temporary = f".tmp-{secrets.token_hex(4)}"
        self._made: list[Path] = []
        if self.prefix.is_dir() or str(prefix).endswith(("/", ".bin", ".idx")):
            raise DataError(
                f"output prefix {prefix} is a folder or a file name; "
                "give the path that .bin and .idx are appended to, such as data/train"
            )
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._temporary_file(".bin").open("wb")

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def add_document(self, ids: Sequence[int] | NDArray[Any]) -> None:
        """Append one document (one sequence) of token ids; DataError for an id not in range."""
        tokens = self._checked(ids)
        self._bin.write(tokens.astype(self.dtype).tobytes())
        self._lengths.append(tokens.size)
        self.num_tokens += tokens.size

    def publish(self, extras: Callable[[Written], Mapping[str, bytes]] | None = None) -> Written:
        """Make the dataset visible: .bin, then the `extras` (suffix to content), the .idx last.

        An old .idx goes first, so that at no moment an index lies beside data it does not describe.
        """
        _sync_close(self._bin)
        self._write(".idx", self._index_bytes())
        binary, index = (file_of(self.prefix, s + self._temporary) for s in (".bin", ".idx"))
        written = Written(
            self.num_tokens,
            len(self._lengths),
            self.max_id,
            self.dtype.name,
            fingerprint_files(binary, index),
        )
        named = dict(extras(written)) if extras else {}
        for suffix, content in named.items():
            self._write(suffix, content)
        file_of(self.prefix, ".idx").unlink(missing_ok=True)
        if ".json" not in named:
            file_of(self.prefix, ".json").unlink(missing_ok=True)  # described the old dataset
        for suffix in (".bin", *named, ".idx"):
            os.replace(file_of(self.prefix, suffix + self._temporary), file_of(self.prefix, suffix))
        _sync_folder(self.prefix.parent)
        self._made.clear()
        return written

    def abort(self) -> None:
        """Remove what is not published; does nothing after `publish`."""
        try:
            self._bin.close()  # may fail on a full disk, as it writes what is buffered
        finally:
            for path in self._made:
                path.unlink(missing_ok=True)
            self._made.clear()

    def _checked(self, ids: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
        number = len(self._lengths)
        if len(ids) > MAX_SEQUENCE_TOKENS:
            raise DataError(
                f"document {number} has {len(ids)} tokens; "
                f"at most {MAX_SEQUENCE_TOKENS} fit the format: split the document"
            )
        tokens = np.asarray(ids)
        if tokens.size == 0:
            return np.zeros(0, dtype=self.dtype)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"document {number}: token ids of type {tokens.dtype} and shape {tokens.shape}; "
                "wanted a one-dimensional sequence of integers"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"document {number}: token id {low if low < 0 else high} does not fit "
                f"vocab_size={self.vocab_size}; ids must be 0 to {self.vocab_size - 1}: "
                "use the vocabulary of the tokenizer that made them"
            )
        self.max_id = max(self.max_id, high)
        return tokens

    def _index_bytes(self) -> bytes:
        lengths = np.array(self._lengths, dtype=np.int32)
        count = len(lengths)
        documents = np.arange(count + 1, dtype="<i8")
        header = HEADER.pack(MAGIC, VERSION, CODES[self.dtype], count, count + 1)
        offsets = byte_offsets(lengths, self.dtype.itemsize)
        body = lengths.astype("<i4").tobytes() + offsets.astype("<i8").tobytes()
        return header + body + documents.tobytes()

    def _temporary_file(self, suffix: str) -> Path:
        path = file_of(self.prefix, suffix + self._temporary)
        self._made.append(path)
        return path

    def _write(self, suffix: str, content: bytes) -> None:
        stream = self._temporary_file(suffix).open("wb")
        stream.write(content)
        _sync_close(stream)


def _sync_close(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
