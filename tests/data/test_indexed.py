"""The indexed format: bytes as documented, refusals by name, nothing loadable half-way."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.corpus.indexed_writer import IndexedWriter
from megalite.data.fingerprint import checksum_files, fingerprint_files
from megalite.data.indexed import IndexedDataset, byte_offsets, dtype_for_vocab
from megalite.errors import DataError
from tests.data.kit import PROPERTY, index_bytes, write_dataset

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8]]


def test_writer_makes_the_documented_bytes(make: Callable[..., Path]) -> None:
    prefix = make(DOCUMENTS)
    assert Path(f"{prefix}.idx").read_bytes() == index_bytes([3, 0, 1, 4], [0, 1, 2, 3, 4])
    assert Path(f"{prefix}.bin").read_bytes() == np.arange(1, 9, dtype="<u2").tobytes()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(65535, "uint16"), (65536, "uint16"), (65537, "int32"), (128256, "int32")],
)
def test_vocabulary_edges_round_trip(
    make: Callable[..., Path], vocab_size: int, dtype: str
) -> None:
    ids = [0, 1, vocab_size // 2, vocab_size - 2, vocab_size - 1]
    data = IndexedDataset(make([ids], vocab_size))
    assert data.dtype.name == dtype
    assert data.read(0, data.num_tokens).tolist() == ids


@pytest.mark.parametrize(
    ("dtype", "code", "vocab_size"),
    [("uint8", 1, 256), ("int16", 3, 300), ("int32", 4, 300), ("int64", 5, 2**40), ("<u2", 8, 300)],
)
def test_documents_of_any_number_of_sequences_in_any_type_are_the_documented_bytes(
    tmp_path: Path, dtype: str, code: int, vocab_size: int
) -> None:
    documents = [[[1, 2], [3]], [], [[4], [], [vocab_size - 1, 5]]]
    with IndexedWriter(tmp_path / "x", vocab_size, dtype) as writer:
        for number, sequences in enumerate(documents):
            writer.add_sequences(sequences, modes=[number] * len(sequences))
        written = writer.publish()
    stored = np.array([1, 2, 3, 4, vocab_size - 1, 5], dtype=dtype)
    assert (tmp_path / "x.bin").read_bytes() == stored.tobytes()
    assert (tmp_path / "x.idx").read_bytes() == index_bytes(
        [2, 1, 1, 0, 2], [0, 2, 2, 5], code, stored.itemsize, modes=[0, 0, 2, 2, 2]
    )
    assert (written.num_documents, written.num_tokens, written.max_id) == (3, 6, vocab_size - 1)
    IndexedDataset(tmp_path / "x").check_all()


def test_the_writer_refuses_types_and_modes_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"uint8 holds ids up to 255, vocab_size=257"):
        IndexedWriter(tmp_path / "x", 257, "uint8")
    with pytest.raises(DataError, match=r"dtype=float32: token ids are stored as one of uint8"):
        IndexedWriter(tmp_path / "x", 257, "float32")
    with IndexedWriter(tmp_path / "x", 257) as writer:
        writer.add_sequences([[1], [2]])
        for modes in ([1], [1, 2]):
            with pytest.raises(DataError, match=r"document 1: \d modes? for 2 sequences"):
                writer.add_sequences([[1], [2]], modes)


@PROPERTY
@given(
    documents=st.lists(st.lists(st.integers(0, 299), max_size=9), max_size=9),
    vocab_size=st.sampled_from([300, 70_000]),
)
def test_any_documents_round_trip(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab_size: int
) -> None:
    prefix = write_dataset(tmp_path_factory.mktemp("d") / "x", documents, vocab_size)
    data = IndexedDataset(prefix)
    assert [data.sequence(n).tolist() for n in range(data.num_sequences)] == documents
    assert data.read(0, data.num_tokens).tolist() == [token for ids in documents for token in ids]
    starts = [sum(map(len, documents[:n])) for n in range(len(documents) + 1)]
    assert [data.document_start(n) for n in range(len(documents) + 1)] == starts
    assert data.document_starts(0, len(starts)).tolist() == starts


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (6, "<f8"), (7, "<f4"), (8, "<u2")],
)
def test_reads_every_dtype_code_and_documents_of_several_sequences(
    tmp_path: Path, code: int, dtype: str
) -> None:
    tokens = np.array([1, 2, 3, 4, 5], dtype=dtype)
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    idx = index_bytes([2, 1, 2], [0, 2, 3], code, tokens.itemsize, modes=[0, 1, 0])
    (tmp_path / "a.idx").write_bytes(idx)
    data = IndexedDataset(tmp_path / "a")
    assert data.dtype == np.dtype(dtype)
    assert data.read(0, data.num_tokens).tolist() == [1, 2, 3, 4, 5]
    assert [data.document_start(n) for n in range(3)] == [0, 3, 5]
    assert data.modes is not None
    assert data.modes.tolist() == [0, 1, 0]


@pytest.mark.parametrize("bad", [1000, -1, 2**40])
def test_writer_refuses_an_id_outside_the_vocabulary(tmp_path: Path, bad: int) -> None:
    with (
        pytest.raises(DataError, match=rf"token id {bad} does not fit vocab_size=1000"),
        IndexedWriter(tmp_path / "a", 1000) as writer,
    ):
        writer.add_document([5, bad])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ids", [[0.5], [True], ["a"], [[1, 2]]])
def test_writer_refuses_what_is_not_a_row_of_integers(tmp_path: Path, ids: Any) -> None:
    with (
        pytest.raises(DataError, match="one-dimensional sequence of integers"),
        IndexedWriter(tmp_path / "a", 1000) as writer,
    ):
        writer.add_document(ids)


def test_writer_refuses_a_sequence_longer_than_int32(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="2147483648 tokens; at most 2147483647"),
        IndexedWriter(tmp_path / "a", 1000) as writer,
    ):
        writer.add_document(range(2**31))


@pytest.mark.parametrize("vocab_size", [0, -5, 2**31 + 1])
def test_impossible_vocabularies_are_refused(vocab_size: int) -> None:
    with pytest.raises(DataError, match=f"vocab_size={vocab_size}"):
        dtype_for_vocab(vocab_size)


@pytest.mark.parametrize("prefix", ["a.bin", "a.idx", "", "sub/"])
def test_prefix_that_is_a_file_or_folder_is_refused(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(DataError, match="output prefix"):
        IndexedWriter(f"{tmp_path}/{prefix}", 10)


def test_byte_offsets_do_not_wrap_near_two_to_the_31() -> None:
    lengths = np.array([2**31 - 1, 2**31 - 1, 2**30, 5], dtype=np.int32)
    wanted = [0, 4 * (2**31 - 1), 8 * (2**31 - 1), 8 * (2**31 - 1) + 2**32]
    assert byte_offsets(lengths, 4).tolist() == wanted


def patched(content: bytes, offset: int, new: bytes) -> bytes:
    return content[:offset] + new + content[offset + len(new) :]


def le(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little", signed=value < 0)


LENGTHS, OFFSETS, BOUNDARIES = 34, 34 + 4 * 4, 34 + 12 * 4
CORRUPTIONS = [
    (0, b"X", "magic"),
    (9, le(2), "version: found 2, wanted 1"),
    (17, le(9, 1), "dtype code: found 9"),
    (17, le(0, 1), "dtype code: found 0"),
    (17, le(4, 1), "byte offset of sequence 1: found 6, wanted 12"),
    (18, le(5), "file length"),
    (18, le(2**63), "file length"),
    (26, le(6), "file length"),
    (26, le(0), "number of document boundaries: found 0"),
    (LENGTHS + 4, le(-1, 4), "length of sequence 1: found -1"),
    (LENGTHS, le(2, 4), "byte offset of sequence 1: found 6, wanted 4"),
    (LENGTHS + 12, le(9, 4), "a.bin: file length: found 16 bytes, wanted 26 bytes"),
    (OFFSETS, le(2), "byte offset of sequence 0: found 2, wanted 0"),
    (OFFSETS + 24, le(2**40), f"byte offset of sequence 3: found {2**40}, wanted 8"),
    (BOUNDARIES, le(1), "first document boundary: found 1, wanted 0"),
    (BOUNDARIES + 8, le(3), "document boundary 2: found 2, wanted 3 or more"),
    (BOUNDARIES + 8, le(-3), "document boundary 1: found -3"),
    (BOUNDARIES + 32, le(5), "last document boundary: found 5, wanted 4"),
]


@pytest.mark.parametrize(("offset", "new", "message"), CORRUPTIONS)
def test_each_damaged_field_is_named(
    make: Callable[..., Path], offset: int, new: bytes, message: str
) -> None:
    path = Path(f"{make(DOCUMENTS, name='a')}.idx")
    path.write_bytes(patched(path.read_bytes(), offset, new))
    with pytest.raises(DataError) as caught:
        IndexedDataset(path.with_suffix(""))
    assert message in str(caught.value)
    assert str(path.parent) in str(caught.value)


def test_no_damaged_byte_and_no_lost_byte_goes_unseen(make: Callable[..., Path]) -> None:
    prefix = make(DOCUMENTS)
    path = Path(f"{prefix}.idx")
    whole = path.read_bytes()
    # int16 (code 3) is as long as uint16; a boundary may be another valid one
    changes = [patched(whole, n, bytes([whole[n] ^ 0x81])) for n in range(BOUNDARIES + 8)]
    for content in changes + [whole[:n] for n in range(len(whole))] + [whole + b"\0"]:
        path.write_bytes(content)
        with pytest.raises(DataError):
            IndexedDataset(prefix)


@pytest.mark.parametrize("size", [0, 15, 17, 18])
def test_token_file_of_another_length_is_refused(make: Callable[..., Path], size: int) -> None:
    prefix = make(DOCUMENTS)
    os.truncate(f"{prefix}.bin", size)
    with pytest.raises(DataError, match=f"found {size} bytes, wanted 16 bytes by its index"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file_is_named(make: Callable[..., Path], suffix: str) -> None:
    prefix = make(DOCUMENTS)
    Path(f"{prefix}{suffix}").unlink()
    with pytest.raises(DataError, match=rf"{suffix}: no such file"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_prefix_given_with_a_suffix_is_refused_with_the_prefix(
    tmp_path: Path, suffix: str
) -> None:
    with pytest.raises(DataError, match=rf"PREFIX\.idx: write '{tmp_path}/data'"):
        IndexedDataset(tmp_path / f"data{suffix}")


def test_dataset_without_documents_opens(make: Callable[..., Path]) -> None:
    data = IndexedDataset(make([]))
    assert (data.num_sequences, data.num_documents, data.num_tokens) == (0, 0, 0)


def publish_three_tokens(
    prefix: Path, extras: Callable[..., dict[str, bytes]] = lambda written: {".json": b"{}"}
) -> None:
    with IndexedWriter(prefix, 10) as writer:
        writer.add_document([1, 2, 3])
        writer.publish(extras)


def test_interruption_at_any_rename_leaves_nothing_loadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_dataset(tmp_path / "a", DOCUMENTS)  # an older dataset is in the way
    for calls in range(3):
        done = 0

        def replace(source: Path, target: Path, allowed: int = calls) -> None:
            nonlocal done
            if done == allowed:
                raise KeyboardInterrupt
            done += 1
            Path(source).rename(target)

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            publish_three_tokens(prefix)
        with pytest.raises(DataError, match="no such file"):
            IndexedDataset(prefix)
        assert not list(tmp_path.glob("*.tmp-*"))


def test_a_run_that_stops_while_writing_keeps_the_older_dataset(make: Callable[..., Path]) -> None:
    prefix = make(DOCUMENTS)

    def interrupted(written: object) -> dict[str, bytes]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish_three_tokens(prefix, interrupted)
    assert IndexedDataset(prefix).read(0, 8).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["data.bin", "data.idx"]


def test_killed_writer_leaves_nothing_loadable(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from megalite.corpus.indexed_writer import IndexedWriter\n"
        "writer = IndexedWriter(sys.argv[1], 10)\n"
        "writer.add_document([1] * 100_000)\n"
        "writer.publish(lambda written: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(DataError, match="no such file"):
        IndexedDataset(tmp_path / "a")


def test_a_loss_mask_is_a_byte_a_token_behind_its_header(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", 300) as writer:
        writer.add_document([1, 2, 3], [False, True, True])
        writer.add_document([4], [False])
        written = writer.publish()
    content = (tmp_path / "x.mask").read_bytes()
    assert content == b"MLMASK\0\0" + struct.pack("<QQ", 1, 4) + bytes([0, 1, 1, 0])
    data = IndexedDataset(tmp_path / "x")
    assert data.loss_mask is not None
    assert data.loss_mask.read(1, 4).tolist() == [1, 1, 0]
    assert fingerprint_files(*data.files) == written.fingerprint

    before = checksum_files(*data.files)
    (tmp_path / "x.mask").write_bytes(content[:-1] + b"\1")
    assert fingerprint_files(*data.files) != written.fingerprint
    assert checksum_files(*data.files) != before
    write_dataset(tmp_path / "x", [[1]])  # a mask of an earlier dataset would mask the new one
    assert not (tmp_path / "x.mask").exists()


def test_a_mask_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with (
        IndexedWriter(tmp_path / "x", 300) as writer,
        pytest.raises(DataError, match=r"a loss mask of shape \(1,\) for 2 tokens"),
    ):
        writer.add_document([1, 2], [True])
    with IndexedWriter(tmp_path / "x", 300) as writer:
        writer.add_document([1, 2], [True, False])
        with pytest.raises(DataError, match="some documents have a loss mask and others none"):
            writer.add_document([3])
    write_dataset(tmp_path / "x", [[1, 2]])
    for content, message in {
        b"MLMASK\0\0" + struct.pack("<QQ", 1, 3) + bytes(3): "states 3 tokens and holds 3",
        b"MLMASK\0\0" + struct.pack("<QQ", 1, 2) + bytes(1): "states 2 tokens and holds 1",
        b"MLMASK\0\0" + struct.pack("<QQ", 2, 2) + bytes(2): "version: found 2, wanted 1",
        b"else": "not a loss mask",
    }.items():
        (tmp_path / "x.mask").write_bytes(content)
        with pytest.raises(DataError, match=message):
            IndexedDataset(tmp_path / "x")
