"""Megatron's indexed dataset, `PREFIX.bin` + `PREFIX.idx`: the format and its reader.

`.bin` holds raw little-endian token ids; `.idx` holds a header, the length and byte offset of each
sequence, and the document boundaries as sequence indices. Byte offsets are int64 arithmetic from
the start: lengths are int32, and their product with the item size would wrap if not widened first.
The writer is in indexed_writer.py; samples are cut in dataset.py.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_VOCAB_SIZE = 2**31  # ids are stored as int32 at most
CHECK_CHUNK = 1 << 20  # index entries checked at a time, so that opening needs little memory


def dtype_for_vocab(vocab_size: int) -> np.dtype[Any]:
    """Type that ids below `vocab_size` are stored in: uint16 up to 65,536 entries, else int32."""
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise DataError(
            f"vocab_size={vocab_size}; an indexed dataset holds 1 to {MAX_VOCAB_SIZE} entries"
        )
    return DTYPES[8] if vocab_size <= 65536 else DTYPES[4]


def byte_offsets(lengths: NDArray[np.int32], item_bytes: int) -> NDArray[np.int64]:
    """Byte offset of each sequence from the lengths in tokens, in int64 throughout."""
    offsets = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1].astype(np.int64) * np.int64(item_bytes), out=offsets[1:])
    return offsets


def file_of(prefix: str | Path, suffix: str) -> Path:
    """`PREFIX` + suffix, also where PREFIX itself holds dots."""
    return Path(f"{prefix}{suffix}")


class IndexedDataset:
    """One dataset opened for reading, memory-mapped; every check of the format is made here.

    `tokens` is the whole `.bin` as one stream; `lengths` [N] in tokens, `offsets` [N] in bytes,
    `documents` [D] as sequence indices, `modes` [N] or None. All are read-only views of the files.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.idx_path = file_of(prefix, ".idx")
        self.bin_path = file_of(prefix, ".bin")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise DataError(
                    f"{path}: no such file; a dataset is PREFIX.bin and PREFIX.idx: "
                    "check the prefix, or make it with `megalite data prepare`"
                )
        self._read_header()
        self._map_index()
        self._check_sequences()
        self._check_documents()
        self._map_tokens()

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def sequence(self, number: int) -> NDArray[Any]:
        """Token ids of one sequence, a view of the file."""
        start = int(self.offsets[number]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[number])]

    def document_start(self, number: int) -> int:
        """Position in the token stream where a document starts; `num_documents` gives the end."""
        sequence = int(self.documents[number])
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self.offsets[sequence]) // self.dtype.itemsize

    def document_starts(self, first: int, stop: int) -> NDArray[np.int64]:
        """`document_start` of documents first .. stop - 1."""
        sequences = self.documents[first:stop].astype(np.int64)
        inside = sequences < self.num_sequences
        starts = np.full(len(sequences), self.num_tokens, dtype=np.int64)
        starts[inside] = self.offsets[sequences[inside]] // self.dtype.itemsize
        return starts

    def _bad(self, path: Path, field: str, found: object, wanted: object) -> DataError:
        return DataError(
            f"{path}: {field}: found {found}, wanted {wanted}; "
            "the file is damaged, unfinished or of another format: prepare or copy it again"
        )

    def _read_header(self) -> None:
        size = self.idx_path.stat().st_size
        if size < HEADER.size:
            raise self._bad(
                self.idx_path, "file length", f"{size} bytes", f"at least {HEADER.size} bytes"
            )
        with self.idx_path.open("rb") as stream:
            magic, version, code, count, boundaries = HEADER.unpack(stream.read(HEADER.size))
        if magic != MAGIC:
            raise self._bad(self.idx_path, "magic", magic, MAGIC)
        if version != VERSION:
            raise self._bad(self.idx_path, "version", version, VERSION)
        if code not in DTYPES:
            raise self._bad(self.idx_path, "dtype code", code, f"one of {sorted(DTYPES)}")
        if boundaries < 1:
            raise self._bad(
                self.idx_path, "number of document boundaries", boundaries, "at least 1"
            )
        plain = HEADER.size + 12 * count + 8 * boundaries
        if size not in (plain, plain + count):
            wanted = f"{plain} (or {plain + count} with modes) for N={count}, D={boundaries}"
            raise self._bad(self.idx_path, "file length", f"{size} bytes", wanted)
        self.dtype = DTYPES[code]
        self._count: int = count
        self._boundaries: int = boundaries
        self._has_modes = count > 0 and size == plain + count

    def _map_index(self) -> None:
        raw = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        count, at = self._count, HEADER.size
        self.lengths = np.frombuffer(raw, "<i4", count, at)
        self.offsets = np.frombuffer(raw, "<i8", count, at + 4 * count)
        self.documents = np.frombuffer(raw, "<i8", self._boundaries, at + 12 * count)
        end = at + 12 * count + 8 * self._boundaries
        self.modes = np.frombuffer(raw, "<i1", count, end) if self._has_modes else None

    def _check_sequences(self) -> None:
        expected, item = 0, self.dtype.itemsize
        for start in range(0, self._count, CHECK_CHUNK):
            lengths = self.lengths[start : start + CHECK_CHUNK]
            if (negative := np.flatnonzero(lengths < 0)).size:
                at = int(negative[0])
                raise self._bad(
                    self.idx_path,
                    f"length of sequence {start + at}",
                    int(lengths[at]),
                    "0 or more tokens",
                )
            wanted = byte_offsets(lengths, item) + np.int64(expected)
            found = self.offsets[start : start + CHECK_CHUNK]
            if (differing := np.flatnonzero(found != wanted)).size:
                at = int(differing[0])
                raise self._bad(
                    self.idx_path,
                    f"byte offset of sequence {start + at}",
                    int(found[at]),
                    int(wanted[at]),
                )
            expected = int(wanted[-1]) + int(lengths[-1]) * item
        if (size := self.bin_path.stat().st_size) != expected:
            raise self._bad(
                self.bin_path, "file length", f"{size} bytes", f"{expected} bytes by its index"
            )

    def _check_documents(self) -> None:
        first, last = int(self.documents[0]), int(self.documents[-1])
        if first != 0:
            raise self._bad(self.idx_path, "first document boundary", first, 0)
        if last != self._count:
            raise self._bad(self.idx_path, "last document boundary", last, self._count)
        for start in range(0, self._boundaries, CHECK_CHUNK):
            part = self.documents[start : start + CHECK_CHUNK + 1]
            if (falls := np.flatnonzero(part[1:] < part[:-1])).size:
                at = int(falls[0])
                raise self._bad(
                    self.idx_path,
                    f"document boundary {start + at + 1}",
                    int(part[at + 1]),
                    f"{int(part[at])} or more",
                )

    def _map_tokens(self) -> None:
        if self.bin_path.stat().st_size == 0:  # an empty file cannot be mapped
            self.tokens: NDArray[Any] = np.zeros(0, dtype=self.dtype)
        else:
            self.tokens = np.asarray(np.memmap(self.bin_path, dtype=self.dtype, mode="r"))
