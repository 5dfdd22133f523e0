"""Ids outside the model's vocabulary are refused early; data changed in place is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megalite.corpus.indexed_writer import IndexedWriter, WrittenDataset
from megalite.data import fingerprint, vocab
from megalite.data.batches import Batches
from megalite.data.dataset import TokenDataset
from megalite.data.sidecar import Sidecar, SourceInfo, TokenizerInfo
from megalite.errors import DataError
from tests.data.kit import index_bytes

Make = Callable[..., Path]


def with_sidecar(prefix: Path, *documents: list[int], **changed: object) -> Path:
    def extras(written: WrittenDataset) -> dict[str, bytes]:
        values: dict[str, object] = {
            "vocab_size": 1000,
            "eos_id": 2,
            "max_id": written.max_id,
            "num_tokens": written.num_tokens,
            "num_documents": written.num_documents,
            "dtype": written.dtype,
            "fingerprint": written.fingerprint,
            "tokenizer": TokenizerInfo(file="t.model", sha256="0", trained=False),
            "source": SourceInfo(description="test", text_bytes=0, skipped={}),
        }
        return {".json": Sidecar.model_validate(values | changed).to_bytes()}

    with IndexedWriter(prefix, 1000) as writer:
        for ids in documents:
            writer.add_document(ids)
        writer.publish(extras)
    return prefix


def test_small_dataset_is_scanned(make: Make) -> None:
    data = TokenDataset(make([[1, 500, 3]]))
    check = data.check_vocab(501)
    assert (check.how, check.max_id) == ("scan", 500)
    with pytest.raises(DataError, match=r"token id 500 .* model\.vocab_size=500; set it to 501"):
        data.check_vocab(500)
    assert data.check_vocab(65536).how == "dtype"


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(np.array([4, -7], dtype="<i4").tobytes())
    (tmp_path / "a.idx").write_bytes(index_bytes([2], [0, 1], code=4, item_bytes=4))
    with pytest.raises(DataError, match="token id -7"):
        TokenDataset(tmp_path / "a").check_vocab(2**31)


def test_large_dataset_is_known_by_its_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab, "SCAN_TOKENS", 2)
    data = TokenDataset(with_sidecar(tmp_path / "a", [1, 500, 3]))
    assert (data.check_vocab(501).how, data.check_vocab(501).max_id) == ("sidecar", 500)
    with pytest.raises(DataError, match=r"token id 500 \(as .*a\.json states\)"):
        data.check_vocab(500)
    with (tmp_path / "a.bin").open("r+b") as stream:  # the same size, other ids
        stream.write(np.array([999], dtype="<u2").tobytes())
    with pytest.raises(DataError, match=r"a\.json: fingerprint: found .* the sidecar states"):
        TokenDataset(tmp_path / "a")


def test_large_dataset_without_sidecar_is_sampled_and_then_checked_while_read(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab, "SCAN_TOKENS", 4)
    monkeypatch.setattr(vocab, "SAMPLE_TOKENS", 4)
    monkeypatch.setattr(vocab, "SCAN_BLOCK", 2)
    data = TokenDataset(make([[1, 2, 900, 901, 5, 6, 7, 8]]))
    check = data.check_vocab(10)  # blocks 0 and 2 are read; 900 lies in block 1
    assert (check.how, check.max_id) == ("sample", 6)
    batches = Batches(data.span(), 3, 0, shuffle=False, vocab_size=10)
    with pytest.raises(DataError, match=r"sample 0 of all holds token id 900; .*vocab_size=10"):
        batches.rank_batches(0, 1, 1, 0, 1)


def test_empty_dataset_has_no_id_to_refuse(make: Make) -> None:
    assert TokenDataset(make([])).check_vocab(1).max_id == -1


def test_sidecar_of_other_files_is_refused(tmp_path: Path) -> None:
    with_sidecar(tmp_path / "a", [1, 2, 3], num_tokens=4)
    with pytest.raises(DataError, match=r"a\.json states .*\(4, 1, 'uint16'\).*\(3, 1, 'uint16'\)"):
        TokenDataset(tmp_path / "a")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"kind": "megalite-dataset"}', b"\xff"])
def test_damaged_sidecar_is_named(tmp_path: Path, content: bytes) -> None:
    with_sidecar(tmp_path / "a", [1, 2, 3])
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.json: "):
        TokenDataset(tmp_path / "a")


def test_writing_anew_without_sidecar_removes_the_old_one(tmp_path: Path) -> None:
    with_sidecar(tmp_path / "a", [1, 2, 3])
    with IndexedWriter(tmp_path / "a", 10) as writer:
        writer.add_document([4])
        writer.publish()
    assert TokenDataset(tmp_path / "a").sidecar is None


def test_fingerprint_notices_the_same_size_and_time(make: Make) -> None:
    prefix = make([[1, 2, 3]])
    stat = Path(f"{prefix}.bin").stat()
    before = TokenDataset(prefix).fingerprint
    assert before == TokenDataset(prefix).fingerprint
    make([[1, 2, 4]])
    os.utime(f"{prefix}.bin", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other = TokenDataset(prefix).fingerprint
    make([[1, 2], [4]])
    assert len({before, other, TokenDataset(prefix).fingerprint}) == 3


def test_fingerprint_of_a_large_file_reads_blocks_with_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 16)
    monkeypatch.setattr(fingerprint, "NUM_BLOCKS", 5)
    (tmp_path / "a.idx").write_bytes(b"index")
    seen = set()
    for place in (None, 0, 15, 1999, 1984):  # 992 .. 1007 is the middle block
        content = bytearray(2000)
        if place is not None:
            content[place] = 1
        (tmp_path / "a.bin").write_bytes(content)
        seen.add(fingerprint.fingerprint_files(tmp_path / "a.bin", tmp_path / "a.idx"))
    assert len(seen) == 5
