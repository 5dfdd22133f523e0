"""The reader at sizes that no test could store, and at files that change under it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megalite.corpus.publish import write_index
from megalite.data import indexed
from megalite.data.indexed import HEADER, MAGIC, IndexedDataset
from megalite.errors import DataError
from tests.data.kit import index_bytes, write_dataset

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8]]


def test_more_documents_than_int32_counts(tmp_path: Path) -> None:
    """A sparse index of 2**31 + 9 sequences and documents; the last three hold tokens."""
    count = 2**31 + 9
    lengths_at, offsets_at = HEADER.size, HEADER.size + 4 * count
    documents_at = offsets_at + 8 * count
    with (tmp_path / "a.idx").open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, 1, 4, count, count + 1))
        for at, dtype, values in (
            (lengths_at + 4 * (count - 3), "<i4", [5, 6, 7]),
            (offsets_at + 8 * (count - 3), "<i8", [0, 20, 44]),
            (documents_at + 8 * (count - 3), "<i8", [count - 3, count - 2, count - 1, count]),
        ):
            stream.seek(at)
            stream.write(np.array(values, dtype=dtype).tobytes())
    (tmp_path / "a.bin").write_bytes(np.arange(18, dtype="<i4").tobytes())
    data = IndexedDataset(tmp_path / "a")
    assert (data.num_sequences, data.num_documents, data.num_tokens) == (count, count, 18)
    assert data.sequence(count - 2).tolist() == [5, 6, 7, 8, 9, 10]
    assert data.document_starts(count - 3, count + 1).tolist() == [0, 5, 11, 18]
    assert data.document_start(count) == 18


def test_the_index_of_a_large_table_is_written_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.corpus.publish.ENTRIES_AT_ONCE", 3)
    lengths = np.array([2**31 - 1] * 5 + [0, 7, 1], dtype=np.int32)
    write_index(tmp_path / "a.idx", np.dtype("<i4"), lengths)
    assert (tmp_path / "a.idx").read_bytes() == index_bytes(lengths.tolist(), range(9), 4, 4)


@pytest.mark.parametrize("entry", [0, 1, 40, 70, 99])
def test_large_tables_are_checked_by_sample_and_whole_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: int
) -> None:
    monkeypatch.setattr(indexed, "OPENING_ENTRIES", 10)
    monkeypatch.setattr(indexed, "SAMPLE_ENTRIES", 3)
    monkeypatch.setattr(indexed, "NUM_SAMPLES", 5)
    prefix = write_dataset(tmp_path / "a", [[1, 2]] * 100)
    IndexedDataset(prefix).check_all()
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    at = HEADER.size + 4 * 100 + 8 * entry
    content[at : at + 8] = (4 * entry + 2).to_bytes(8, "little")
    Path(f"{prefix}.idx").write_bytes(content)
    with pytest.raises(DataError, match=f"byte offset of sequence {entry}: found {4 * entry + 2}"):
        IndexedDataset(prefix).check_all()
    if entry in (0, 1, 99):  # both ends are always looked at
        with pytest.raises(DataError, match=f"byte offset of sequence {entry}"):
            IndexedDataset(prefix)


@pytest.mark.parametrize("at", range(HEADER.size))
def test_any_byte_of_the_header_is_refused_by_name_or_reads_right(
    make: Callable[..., Path], at: int
) -> None:
    prefix = make(DOCUMENTS)
    path = Path(f"{prefix}.idx")
    whole = path.read_bytes()
    for value in (0, 1, 2, 3, 5, 8, 127, 128, 254, 255):
        path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
        try:
            found = IndexedDataset(prefix)
        except DataError as error:
            message = str(error)
        else:
            message = ""
            assert [found.sequence(n).tolist() for n in range(4)] == DOCUMENTS
        parts = (f"{prefix}.", ": found ", ", wanted ") if message else ()
        assert all(part in message for part in parts)


def test_a_token_file_shortened_after_opening_is_an_error_not_a_crash(
    make: Callable[..., Path],
) -> None:
    prefix = make([range(100), range(900)])
    data = IndexedDataset(prefix)
    assert data.read(95, 105).tolist() == [95, 96, 97, 98, 99, 0, 1, 2, 3, 4]
    os.truncate(f"{prefix}.bin", 400)
    assert data.sequence(0).tolist() == list(range(100))
    wanted = "data.bin: file length: found 400 bytes now, wanted 2000 bytes as when it was opened"
    with pytest.raises(DataError, match=wanted):
        data.sequence(1)
    assert data.read(5, 5).size == 0
    for start, stop in ((-1, 3), (5, 4), (0, 1001)):
        with pytest.raises(DataError, match=f"tokens {start} to {stop} asked for; it holds 1000"):
            data.read(start, stop)
