"""Several sources in one run: exact shares, epochs of their own, the same at any layout."""

from __future__ import annotations

import os
import struct
import sys
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.data import fingerprint
from megalite.data.batches import Batches
from megalite.data.dataset import TokenDataset, TokenSpan
from megalite.data.indexed import HEADER, MAGIC
from megalite.errors import DataError
from tests.data.kit import PROPERTY, write_dataset

S = 4  # tokens a sample
Opened = dict[tuple[int, int], TokenSpan]


@pytest.fixture(scope="module")
def open_source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], TokenSpan]:
    """open_source(k, samples): a span whose token t is 1000 k + t, made once."""
    folder, made = tmp_path_factory.mktemp("sources"), Opened()

    def build(source: int, samples: int) -> TokenSpan:
        if (source, samples) not in made:
            ids = np.arange(samples * S + 1) + 1000 * source
            prefix = write_dataset(folder / f"{source}-{samples}", [ids.tolist()], vocab_size=9000)
            made[source, samples] = TokenDataset(prefix).span()
        return made[source, samples]

    return build


BLENDS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=5).filter(
    lambda blend: any(weight for _, weight in blend)
)


@pytest.mark.long
@PROPERTY
@given(blend=BLENDS, seed=st.integers(0, 99), first=st.integers(0, 10**6))
def test_shares_are_exact_and_each_source_goes_through_its_own_epochs(
    open_source: Callable[[int, int], TokenSpan],
    blend: list[tuple[int, int]],
    seed: int,
    first: int,
) -> None:
    sizes, weights = [n for n, _ in blend], [Fraction(w) for _, w in blend]
    spans = [open_source(source, size) for source, size in enumerate(sizes)]
    batches = Batches(spans, S, seed, weights=weights)
    length, total = 90, sum(weights)
    ids = batches.sample_ids(0, length).tolist()
    owner = [source for source, size in enumerate(sizes) for _ in range(size)]
    for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        mine = [sample for sample in ids if owner[sample] == source]
        assert abs(len(mine) - length * weight / total) <= 1
        for epoch in [mine[start : start + size] for start in range(0, len(mine), size)]:
            assert len(set(epoch)) == len(epoch)  # no sample twice before all came once
    # at another place, in other portions, by another object
    again = Batches(spans, S, seed, weights=weights)
    whole = batches.sample_ids(first, 24).tolist()
    assert [int(again.sample_ids(first + n, 1)[0]) for n in range(24)] == whole


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (1, 8), (2, 2), (4, 1), (8, 1)])
def test_layouts_give_the_same_tokens_of_a_blend(
    open_source: Callable[[int, int], TokenSpan], dp: int, micro_batch: int
) -> None:
    spans = [open_source(0, 30), open_source(1, 3), open_source(2, 7)]
    batches = Batches(spans, S, 5, weights=[Fraction(6), Fraction(3), Fraction(1)])
    for first in (0, 8, 8 * 10**9):
        (whole,) = batches.rank_batches(first, 8, 8, 0, 1)
        parts = [b for r in range(dp) for b in batches.rank_batches(first, 8, micro_batch, r, dp)]
        assert torch.equal(torch.cat([b.tokens for b in parts]), whole.tokens)
        assert torch.equal(torch.cat([b.labels for b in parts]), whole.tokens + 1)
        assert np.concatenate([b.sample_ids for b in parts]).tolist() == whole.sample_ids.tolist()


def test_sources_of_one_size_go_in_different_orders_and_one_source_as_without_a_blend(
    open_source: Callable[[int, int], TokenSpan],
) -> None:
    spans = [open_source(0, 30), open_source(1, 30)]
    ids = Batches(spans, S, 5, weights=[Fraction(1)] * 2).sample_ids(0, 60)
    first, second = ids[ids < 30], ids[ids >= 30] - 30
    assert sorted(first) == sorted(second) == list(range(30))
    assert first.tolist() != second.tolist()
    alone = Batches(spans[0], S, 5).sample_ids(0, 30)
    assert alone.tolist() == first.tolist()


def test_a_source_of_weight_zero_needs_no_sample_and_gives_none(
    open_source: Callable[[int, int], TokenSpan],
) -> None:
    empty = TokenSpan(open_source(1, 3).data, "train", 0, 1)
    batches = Batches([open_source(0, 5), empty], S, 1, weights=[Fraction(1), Fraction(0)])
    assert Counter(batches.sample_ids(0, 10).tolist()) == dict.fromkeys(range(5), 2)
    with pytest.raises(DataError, match="train gets 1 of 13 tokens"):
        Batches([open_source(0, 5), empty], S, 1, weights=[Fraction(1), Fraction(1, 10**6)])


def sparse_dataset(prefix: Path, tokens: int) -> Path:
    """A dataset of int32 zeros that holds no byte on disk but its index."""
    count = -(-tokens // (2**31 - 1))
    lengths = np.full(count, 2**31 - 1, dtype="<i4")
    lengths[-1] = tokens - (count - 1) * (2**31 - 1)
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1].astype("<i8") * 4)]).astype("<i8")
    head = struct.pack(HEADER.format, MAGIC, 1, 4, count, count + 1)
    documents = np.arange(count + 1, dtype="<i8")
    Path(f"{prefix}.idx").write_bytes(
        head + lengths.tobytes() + offsets.tobytes() + documents.tobytes()
    )
    with Path(f"{prefix}.bin").open("wb") as stream:
        os.truncate(stream.fileno(), 4 * tokens)
    return prefix


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory and bytes read through /proc")
def test_a_trillion_tokens_open_and_seek_with_little_memory_and_few_bytes(tmp_path: Path) -> None:
    prefix = sparse_dataset(tmp_path / "huge", 10**12)
    before, read_before = resident_bytes(), bytes_read()
    data = TokenDataset(prefix)
    assert data.num_tokens == 10**12
    data.check_vocab(50_000)
    data.identity()
    train = data.split("98,2", 4096)["train"]
    batches = Batches(train, 4096, 1234, document_masks=True, vocab_size=50_000)
    step, global_batch = 10**6, 512
    parts = batches.rank_batches(step * global_batch, global_batch, 8, 3, 8)
    assert sum(len(part.tokens) for part in parts) == 64 * 4096
    assert resident_bytes() - before < 100 << 20
    assert bytes_read() - read_before < 200 << 20


def bytes_read() -> int:
    """Bytes that this process has asked the system for, from page cache or disk."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_the_fingerprint_of_a_large_index_reads_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 256)
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 16)
    monkeypatch.setattr(fingerprint, "NUM_BLOCKS", 4)
    prefix = write_dataset(tmp_path / "a", [[1]] * 50)
    known = TokenDataset(prefix).identity()
    assert known == TokenDataset(prefix).identity()
    with Path(f"{prefix}.idx").open("r+b") as stream:
        stream.seek(-8, os.SEEK_END)
        stream.write(b"\x01")
    assert fingerprint.fingerprint_files(Path(f"{prefix}.bin"), Path(f"{prefix}.idx")) != (
        known.fingerprint
    )
