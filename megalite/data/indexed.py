"""Megatron's indexed dataset, `PREFIX.bin` + `PREFIX.idx`: the format and its reader.

`.bin` holds raw little-endian token ids; `.idx` holds a header, the length and byte offset of each
sequence, and the document boundaries as sequence indices. Byte offsets are computed in int64:
lengths are int32, and their product with the item size would wrap if not widened first.
The writer is corpus/indexed_writer.py; dataset.py cuts the stream into samples.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.loss_mask import SUFFIX, LossMask
from megalite.errors import DataError
from megalite.wording import number_of

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
OPENING_ENTRIES = 1 << 22  # of larger tables, opening checks only NUM_SAMPLES even blocks
NUM_SAMPLES, SAMPLE_ENTRIES = 64, 4096


def dtype_for_vocab(vocab_size: int) -> np.dtype[Any]:
    """The type for ids below `vocab_size`: uint16 up to 65,536 entries, else int32."""
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise DataError(
            f"vocab_size={vocab_size}; an indexed dataset holds 1 to {MAX_VOCAB_SIZE} entries"
        )
    return DTYPES[8] if vocab_size <= 65536 else DTYPES[4]


def byte_offsets(lengths: NDArray[np.int32], item_bytes: int) -> NDArray[np.int64]:
    """The byte offset of each sequence, by the lengths [N] in tokens; int64 throughout."""
    offsets = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1].astype(np.int64) * np.int64(item_bytes), out=offsets[1:])
    return offsets


def file_of(prefix: str | Path, suffix: str) -> Path:
    """The path PREFIX + suffix; unlike Path.with_suffix also for a PREFIX with dots."""
    return Path(f"{prefix}{suffix}")


class IndexedDataset:
    """One dataset opened for reading, memory-mapped; all checks of the format are made here.

    Tables of more than OPENING_ENTRIES are checked by sample on opening, so a dataset of any size
    opens at once; `check_all` checks every entry. Tokens are read and not mapped: a mapped file
    that was shortened after it was opened would end the process with SIGBUS, and `read` raises
    DataError. Raises DataError for a file that is missing or damaged.

    `num_tokens` of the whole `.bin`, which is one stream; `lengths` [N] in tokens, `offsets` [N] in
    bytes, `documents` [D] as sequence indices, `modes` [N] or None, read-only views of the index.
    `loss_mask`: which tokens are trained on, of PREFIX.mask, None without such a file.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.idx_path = file_of(prefix, ".idx")
        self.bin_path = file_of(prefix, ".bin")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                remedy = "check the prefix, or make it with `megalite data prepare`"
                if self.prefix.suffix in (".bin", ".idx"):
                    remedy = f"write {str(self.prefix.with_suffix(''))!r}"
                raise DataError(
                    f"{path}: no such file; a dataset is PREFIX.bin and PREFIX.idx: {remedy}"
                )
        self._read_header()
        self._map_index()
        self._check_sequences(OPENING_ENTRIES)
        self._check_documents(OPENING_ENTRIES)
        self._descriptor = os.open(self.bin_path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self.num_tokens = os.fstat(self._descriptor).st_size // self.dtype.itemsize
        mask_path = file_of(prefix, SUFFIX)
        has_mask = mask_path.is_file()
        self.loss_mask = LossMask(mask_path, self.num_tokens) if has_mask else None

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the dataset: tokens, index, and the loss mask, if any."""
        more = () if self.loss_mask is None else (self.loss_mask.path,)
        return (self.bin_path, self.idx_path, *more)

    def check_all(self) -> None:
        """Check every entry of the index; raises DataError with the first bad one."""
        self._check_sequences(self._count)
        self._check_documents(self._boundaries)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def sequence(self, number: int) -> NDArray[Any]:
        """Token ids of one sequence."""
        start = int(self.offsets[number]) // self.dtype.itemsize
        return self.read(start, start + int(self.lengths[number]))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start .. stop - 1 of the stream, copied; DataError if the file lacks them."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise DataError(
                f"{self.bin_path}: tokens {start} to {stop} asked for; "
                f"it holds {self.num_tokens}: its index is damaged"
            )
        item = self.dtype.itemsize
        out = np.empty(stop - start, dtype=self.dtype)
        unread, done = out.view(np.uint8).data, 0
        while done < len(unread):  # one call may read a part
            count = os.preadv(self._descriptor, [unread[done:]], start * item + done)
            if count == 0:
                raise self._bad(
                    self.bin_path,
                    "file length",
                    f"{number_of(os.fstat(self._descriptor).st_size, 'byte')} now",
                    f"{number_of(self.num_tokens * item, 'byte')} as when it was opened",
                )
            done += count
        return out

    def document_start(self, number: int) -> int:
        """Position in the token stream at which a document starts; the end for `num_documents`."""
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
        """Read the header and check that the index has the length that it implies."""
        size = self.idx_path.stat().st_size
        if size < HEADER.size:
            raise self._bad(
                self.idx_path,
                "file length",
                number_of(size, "byte"),
                f"at least {HEADER.size} bytes",
            )
        with self.idx_path.open("rb") as stream:
            magic, version, code, count, boundaries = HEADER.unpack(stream.read(HEADER.size))

        # In this order: with another magic or version the later fields may mean anything.
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

        # A sequence takes 4 bytes of length and 8 of offset, a boundary 8, and a mode 1 if there
        # are modes: only the file's length shows whether there are.
        plain = HEADER.size + 12 * count + 8 * boundaries
        if size not in (plain, plain + count):
            wanted = f"{plain} (or {plain + count} with modes) for N={count}, D={boundaries}"
            raise self._bad(self.idx_path, "file length", number_of(size, "byte"), wanted)
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

    def _blocks(self, count: int, limit: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of the entries to check: all if `count` is at most `limit`.

        Otherwise NUM_SAMPLES blocks of SAMPLE_ENTRIES, evenly spread, with both ends.
        """
        if count <= limit:
            for start in range(0, count, CHECK_CHUNK):
                yield start, min(start + CHECK_CHUNK, count)
            return
        last = count - SAMPLE_ENTRIES
        for number in range(NUM_SAMPLES):
            start = last * number // (NUM_SAMPLES - 1)
            yield start, start + SAMPLE_ENTRIES

    def _entries(self, dtype: str, at: int, start: int, stop: int) -> NDArray[np.int64]:
        """Entries start .. stop - 1 of the table at byte `at` of the index.

        Read and not mapped, so no page of the file stays in memory.
        """
        kind = np.dtype(dtype)
        offset = at + start * kind.itemsize
        found = np.fromfile(self.idx_path, kind, stop - start, offset=offset)
        if len(found) != stop - start:
            size = self.idx_path.stat().st_size
            wanted = f"{offset + (stop - start) * kind.itemsize} or more"
            raise self._bad(self.idx_path, "file length", f"{number_of(size, 'byte')} now", wanted)
        return found.astype(np.int64)

    def _check_sequences(self, limit: int) -> None:
        """Check lengths and byte offsets in blocks, and the size of the token file."""
        item, at = self.dtype.itemsize, HEADER.size
        end = 0  # of the last sequence in bytes
        for start, stop in self._blocks(self._count, limit):
            # Each entry is compared with the one before it, which the block before may hold.
            before = max(start - 1, 0)
            lengths = self._entries("<i4", at, before, stop)
            found = self._entries("<i8", at + 4 * self._count, before, stop)
            if (negative := np.flatnonzero(lengths < 0)).size:
                number = int(negative[0])
                raise self._bad(
                    self.idx_path,
                    f"length of sequence {before + number}",
                    int(lengths[number]),
                    "0 or more tokens",
                )

            wanted = np.empty_like(found)
            wanted[0] = found[0] if before else 0
            wanted[1:] = found[:-1] + lengths[:-1] * item
            if (differing := np.flatnonzero(found != wanted)).size:
                number = int(differing[0])
                raise self._bad(
                    self.idx_path,
                    f"byte offset of sequence {before + number}",
                    int(found[number]),
                    int(wanted[number]),
                )
            end = int(found[-1]) + int(lengths[-1]) * item

        # The last block holds the last sequence also when blocks are sampled, so `end` is the end.
        if (size := self.bin_path.stat().st_size) != end:
            raise self._bad(
                self.bin_path,
                "file length",
                number_of(size, "byte"),
                f"{number_of(end, 'byte')} by its index",
            )

    def _check_documents(self, limit: int) -> None:
        """Check that document boundaries go from 0 to the number of sequences and never fall."""
        at = HEADER.size + 12 * self._count
        first, last = (
            int(self._entries("<i8", at, n, n + 1)[0]) for n in (0, self._boundaries - 1)
        )
        if first != 0:
            raise self._bad(self.idx_path, "first document boundary", first, 0)
        if last != self._count:
            raise self._bad(self.idx_path, "last document boundary", last, self._count)
        for start, stop in self._blocks(self._boundaries, limit):
            before = max(start - 1, 0)
            part = self._entries("<i8", at, before, stop)
            if (falls := np.flatnonzero(part[1:] < part[:-1])).size:
                number = int(falls[0])
                raise self._bad(
                    self.idx_path,
                    f"document boundary {before + number + 1}",
                    int(part[number + 1]),
                    f"{int(part[number])} or more",
                )
