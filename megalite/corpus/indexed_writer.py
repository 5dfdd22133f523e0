"""Writing Megatron's indexed dataset, see data/indexed.py: one sequence per document, atomically.

Finished files are renamed, the index last, so an interrupted run leaves nothing that can be opened
as a dataset; a killed one may leave `PREFIX.*.tmp-*` files, which nothing reads. Takes token ids,
no text.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.corpus.publish import check_prefix, publish_files, sync, write_index, write_synced
from megalite.data.fingerprint import fingerprint_files
from megalite.data.indexed import dtype_for_vocab, file_of
from megalite.errors import DataError

MAX_SEQUENCE_TOKENS = 2**31 - 1  # lengths are stored as int32


@dataclass(frozen=True)
class WrittenDataset:
    """The summary of a dataset's files, made before they are published."""

    num_tokens: int
    num_documents: int
    max_id: int  # -1: no token
    dtype: str
    fingerprint: str


class IndexedWriter:
    """Writes one dataset: `add_document` for each document, then `publish`.

    A context manager that removes its temporary files unless `publish` succeeded. Files of an
    earlier dataset at the same prefix stay until then, and are replaced.
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
        check_prefix(prefix)
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._temporary_file(".bin").open("wb")

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def add_document(self, ids: Sequence[int] | NDArray[Any]) -> None:
        """Append one document (one sequence) of token ids [n].

        Raises DataError for ids outside the vocabulary, of another type or shape, or too many.
        """
        tokens = self._checked(ids)
        self._bin.write(tokens.astype(self.dtype).tobytes())
        self._lengths.append(tokens.size)
        self.num_tokens += tokens.size

    def publish(
        self, extras: Callable[[WrittenDataset], Mapping[str, bytes]] | None = None
    ) -> WrittenDataset:
        """Make the dataset visible: the .bin, the extra files, the .idx last.

        `extras(summary)` gives the content of extra files by suffix, such as ".json".
        """
        sync(self._bin)
        self._bin.close()
        made = {".bin": self._made[0]}
        index = self._temporary_file(".idx")
        write_index(index, self.dtype, np.frombuffer(self._lengths, dtype=np.int32))

        # The extras may state the fingerprint, so all content exists before the first rename.
        written = WrittenDataset(
            self.num_tokens,
            len(self._lengths),
            self.max_id,
            self.dtype.name,
            fingerprint_files(made[".bin"], index),
        )
        for suffix, content in (extras(written) if extras else {}).items():
            made[suffix] = self._temporary_file(suffix)
            write_synced(made[suffix], content)
        publish_files(self.prefix, {**made, ".idx": index})
        self._made.clear()
        return written

    def abort(self) -> None:
        """Remove the temporary files; does nothing after `publish`."""
        try:
            self._bin.close()  # may fail on a full disk, as it writes what is buffered
        finally:
            for path in self._made:
                path.unlink(missing_ok=True)
            self._made.clear()

    def _checked(self, ids: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
        """The ids as an array; updates `max_id`."""
        number = len(self._lengths)
        if len(ids) > MAX_SEQUENCE_TOKENS:
            raise DataError(
                f"document {number} has {len(ids)} tokens; "
                f"at most {MAX_SEQUENCE_TOKENS} fit the format: split the document"
            )

        # numpy makes floats of an empty list, so its type is not checked.
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

    def _temporary_file(self, suffix: str) -> Path:
        path = file_of(self.prefix, suffix + self._temporary)
        self._made.append(path)
        return path
