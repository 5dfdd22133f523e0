"""Writing Megatron's indexed dataset, see data/indexed.py, and a loss mask beside it, atomically.

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
from megalite.data.indexed import CODES, dtype_for_vocab, file_of
from megalite.data.loss_mask import SUFFIX, header
from megalite.errors import DataError
from megalite.wording import number_of

MAX_SEQUENCE_TOKENS = 2**31 - 1  # lengths are stored as int32
Ids = Sequence[int] | NDArray[Any]


@dataclass(frozen=True)
class WrittenDataset:
    """The summary of a dataset's files, made before they are published."""

    num_tokens: int
    num_documents: int
    max_id: int  # -1: no token
    dtype: str
    fingerprint: str


class IndexedWriter:
    """Writes one dataset: `add_document` or `add_sequences` for each document, then `publish`.

    A context manager that removes its temporary files unless `publish` succeeded. Files of an
    earlier dataset at the same prefix stay until then, and are replaced. `dtype`: an integer type
    of the format for ids below `vocab_size`; by default uint16, or int32 above 65,536.
    """

    def __init__(
        self, prefix: str | Path, vocab_size: int, dtype: np.dtype[Any] | str | None = None
    ) -> None:
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.dtype = dtype_for_vocab(vocab_size) if dtype is None else _fitting(dtype, vocab_size)
        self.num_tokens = 0
        self.max_id = -1
        self._lengths = array("i")
        self._documents = array("q", [0])  # boundaries, as numbers of sequences
        self._modes = array("b")
        self._masks: list[NDArray[np.uint8]] = []
        self._masked_tokens = 0
        self._temporary = f".tmp-{secrets.token_hex(4)}"
        self._made: list[Path] = []
        check_prefix(prefix)
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._temporary_file(".bin").open("wb")

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def add_document(
        self, ids: Ids, loss_mask: Sequence[bool] | NDArray[Any] | None = None
    ) -> None:
        """Append one document (one sequence) of token ids [n], and its loss mask [n], if any.

        Raises DataError for ids outside the vocabulary, of another type or shape, or too many, and
        if some documents have a mask and others none.
        """
        self.add_sequences([ids])
        if loss_mask is not None:
            mask = np.asarray(loss_mask, dtype=bool)
            if mask.shape != (len(ids),):
                number = len(self._documents) - 2
                raise DataError(
                    f"document {number}: a loss mask of shape {mask.shape} for "
                    f"{number_of(len(ids), 'token')}; "
                    "give one value a token"
                )
            self._masks.append(mask.astype(np.uint8))
            self._masked_tokens += len(mask)
        if self._masked_tokens not in (0, self.num_tokens):
            raise DataError("some documents have a loss mask and others none; give all of them one")

    def add_sequences(self, sequences: Sequence[Ids], modes: Sequence[int] | None = None) -> None:
        """Append one document of any number of sequences, and the mode of each where there are any.

        Raises DataError as `add_document` does, and if some sequences have a mode and others none.
        """
        checked = [self._checked(ids) for ids in sequences]
        given = () if modes is None else modes
        is_whole = len(given) in (0, len(checked))
        is_alike = not self._lengths or not checked or bool(self._modes) == bool(given)
        if not (is_whole and is_alike):
            raise DataError(
                f"document {len(self._documents) - 1}: {number_of(len(given), 'mode')} for "
                f"{number_of(len(checked), 'sequence')}, after {len(self._modes)} for "
                f"{len(self._lengths)}; give all sequences of a dataset a mode, or none"
            )
        for tokens in checked:
            self._bin.write(tokens.astype(self.dtype).tobytes())
            self._lengths.append(tokens.size)
            self.num_tokens += tokens.size
        self._modes.extend(given)
        self._documents.append(len(self._lengths))

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
        write_index(
            index,
            self.dtype,
            np.frombuffer(self._lengths, dtype=np.int32),
            np.frombuffer(self._documents, dtype=np.int64),
            np.frombuffer(self._modes, dtype=np.int8) if self._modes else None,
        )
        if self._masks:
            made[SUFFIX] = self._temporary_file(SUFFIX)
            write_synced(
                made[SUFFIX], header(self.num_tokens) + np.concatenate(self._masks).tobytes()
            )

        # The extras may state the fingerprint, so all content exists before the first rename.
        written = WrittenDataset(
            self.num_tokens,
            len(self._documents) - 1,
            self.max_id,
            self.dtype.name,
            fingerprint_files(made[".bin"], index, *(made[s] for s in (SUFFIX,) if s in made)),
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

    def _checked(self, ids: Ids) -> NDArray[Any]:
        """The ids as an array; updates `max_id`."""
        number = len(self._documents) - 1
        if len(ids) > MAX_SEQUENCE_TOKENS:
            raise DataError(
                f"document {number} has {number_of(len(ids), 'token')}; "
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


def _fitting(dtype: np.dtype[Any] | str, vocab_size: int) -> np.dtype[Any]:
    """The integer type of the format that `dtype` names; DataError if ids do not fit into it."""
    found = np.dtype(dtype).newbyteorder("<")
    if found not in CODES or found.kind not in "iu":
        names = ", ".join(known.name for known in CODES if known.kind in "iu")
        raise DataError(f"dtype={np.dtype(dtype).name}: token ids are stored as one of {names}")
    if vocab_size - 1 > np.iinfo(found).max:
        raise DataError(
            f"dtype={found.name} holds ids up to {np.iinfo(found).max}, vocab_size={vocab_size} "
            f"has them up to {vocab_size - 1}; use a larger type"
        )
    return found
