"""Loss masks, packing of whole documents, splits at documents: against loops written out here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.corpus.indexed_writer import IndexedWriter
from megalite.data.batches import Batches, MicroBatch
from megalite.data.dataset import TokenDataset
from megalite.data.samples import Packing
from megalite.errors import DataError
from tests.data.kit import PROPERTY, write_dataset

S = 8


def write_masked(prefix: Path, documents: list[list[int]], masks: list[list[int]]) -> Path:
    with IndexedWriter(prefix, 1000) as writer:
        for ids, mask in zip(documents, masks, strict=True):
            writer.add_document(ids, np.array(mask, dtype=bool))
        writer.publish()
    return prefix


def one(batches: Batches, sample: int) -> MicroBatch:
    return batches.rank_batches(sample, 1, 1, 0, 1)[0]


def segments(batch: MicroBatch) -> list[list[int]]:
    bounds = batch.cu_seqlens.tolist()
    return [batch.tokens[start:stop].tolist() for start, stop in pairwise(bounds)]


def test_a_label_counts_where_its_token_is_marked(tmp_path: Path):
    documents, masks = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], [[0, 0, 1, 1, 0], [1, 1, 0, 1, 1]]
    data = TokenDataset(write_masked(tmp_path / "x", documents, masks))
    plain = one(Batches(data.span(), 9, 0, shuffle=False), 0)
    assert plain.labels.tolist() == list(range(2, 11))
    assert plain.loss_weight.tolist() == [0, 1, 1, 0, 1, 1, 0, 1, 1]
    masked = one(Batches(data.span(), 9, 0, shuffle=False, document_masks=True), 0)
    assert masked.loss_weight.tolist() == [0, 1, 1, 0, 0, 1, 0, 1, 1]  # 6 follows from nothing


def test_eod_mask_loss_leaves_attention_alone(make: Callable[..., Path]):
    data = TokenDataset(make([[1, 2, 3], [4, 5, 6, 7, 8, 9]]))
    batch = one(Batches(data.span(), S, 0, shuffle=False, eod_mask_loss=True), 0)
    assert batch.loss_weight.tolist() == [1, 1, 0, 1, 1, 1, 1, 1]
    assert batch.cu_seqlens.tolist() == [0, S]


def test_whole_documents_fill_samples_and_padding_is_a_segment_without_loss(
    make: Callable[..., Path],
):
    documents = [[1, 2, 3], [4, 5, 6, 7], [10, 11, 12, 13, 14, 15], [20, 21, 22], [30]]
    batches = Batches(
        TokenDataset(make(documents)).span(),
        Packing(S, whole_documents=True),
        0,
        shuffle=False,
        document_masks=True,
    )
    assert batches.num_samples == 2
    first, second = (one(batches, number) for number in (0, 1))
    assert segments(first) == [[1, 2, 3], [4, 5, 6, 7], [0]]
    assert first.loss_weight.tolist() == [1, 1, 0, 1, 1, 1, 0, 0]
    assert segments(second) == [[10, 11, 12, 13, 14, 15], [20, 21]]  # 22 is a label alone
    assert second.loss_weight.tolist() == [1, 1, 1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("drop", [False, True])
def test_long_documents_are_cut_or_left_out_and_counted(make: Callable[..., Path], drop: bool):
    long = list(range(100, 115))
    data = TokenDataset(make([[1, 2, 3], long, [7, 8, 9]]))
    packing = Packing(S, whole_documents=True, drop_long=drop)
    batches = Batches(data.span(), packing, 0, shuffle=False, document_masks=True)
    tokens = [segments(one(batches, number))[0] for number in range(batches.num_samples)]
    kept = [] if drop else [long[:S]]
    assert tokens == [[1, 2, 3], *kept, [7, 8, 9]]
    notes = batches.samples[0].notes()
    done = "left out, with 15 tokens" if drop else "cut there, with 6 tokens"
    assert notes[1] == f"1 document of more than 9 tokens is {done} (data.long_documents)"
    assert notes[0] == f"whole documents fill {4 / 16 if drop else 12 / 24:.1%} of the samples"


@PROPERTY
@given(
    lengths=st.lists(st.integers(0, 14), min_size=1, max_size=12),
    drop=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_documents_are_packed_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], drop: bool, seed: int
):
    generator, token = np.random.default_rng(seed), iter(range(1, 999))
    documents = [[next(token) for _ in range(n)] for n in lengths]
    masks = [generator.integers(0, 2, n).tolist() for n in lengths]
    prefix = write_masked(tmp_path_factory.mktemp("d") / "x", documents, masks)
    packing = Packing(S, whole_documents=True, drop_long=drop)
    span = TokenDataset(prefix).span()
    limit = S + 1
    kept = [(d, m) for d, m in zip(documents, masks, strict=True) if len(d) <= limit or not drop]
    wanted = [
        (label, weight)
        for ids, mask in kept
        for label, weight in zip(ids[1:limit], mask[1:limit], strict=True)
    ]
    if not span.samples(packing).num_samples:
        assert not any(len(ids) > 1 for ids, _ in kept)
        return
    batches = Batches(span, packing, 0, shuffle=False, document_masks=True)
    found = []
    first_of = {ids[0] for ids in documents if ids}
    for number in range(batches.num_samples):
        batch = one(batches, number)
        for label, weight in zip(batch.labels.tolist(), batch.loss_weight.tolist(), strict=True):
            if label and label not in first_of:
                found.append((label, weight))
            else:
                assert weight == 0
        for segment in segments(batch):  # each within one document
            assert any(segment == ids[: len(segment)] for ids in [*documents, [0] * S])
    assert found == wanted


def test_a_split_at_documents_cuts_none(make: Callable[..., Path]):
    documents = [[1] * 30, [2] * 30, [3] * 30, [4] * 30]
    data = TokenDataset(make(documents))
    assert [s.num_tokens for s in data.split("50,50", S).values()] == [60, 60]
    at = data.split("40,60", S, at_documents=True)
    assert [(s.start, s.stop) for s in at.values()] == [(0, 60), (60, 120)]
    packed = data.split("40,60", Packing(40, whole_documents=True))
    assert [(s.start, s.stop) for s in packed.values()] == [(0, 60), (60, 120)]
    assert [(s.start, s.stop) for s in data.split("40,60", S).values()] == [(0, 48), (48, 120)]
    with pytest.raises(DataError, match="validation gets 0 of 120 tokens"):
        data.split("98,2", S, at_documents=True)


def test_a_dataset_of_no_pair_of_tokens_is_refused(make: Callable[..., Path]):
    with pytest.raises(DataError, match=r"no sample of data.seq_length=8 \(it takes 2 tokens\)"):
        Batches(TokenDataset(make([[1]])).span(), Packing(S, whole_documents=True), 0)


def test_a_mask_that_its_sidecar_does_not_state_is_refused(tmp_path: Path):
    from tests.data.test_vocab_and_fingerprint import with_sidecar

    with_sidecar(tmp_path / "x", [1, 2, 3, 4])
    write_masked(tmp_path / "y", [[1, 2, 3, 4]], [[1, 1, 0, 0]])
    (tmp_path / "y.mask").rename(tmp_path / "x.mask")
    with pytest.raises(DataError, match=r"PREFIX.mask beside it is not one that it states"):
        TokenDataset(tmp_path / "x")


def test_the_stream_without_masks_is_as_it_was(tmp_path: Path):
    documents = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    plain = TokenDataset(write_dataset(tmp_path / "a", documents))
    marked = TokenDataset(write_masked(tmp_path / "b", documents, [[1] * 5, [1] * 5]))
    for one_batch, other in zip(
        Batches(plain.span(), 4, 3).rank_batches(0, 2, 2, 0, 1),
        Batches(marked.span(), 4, 3).rank_batches(0, 2, 2, 0, 1),
        strict=True,
    ):
        assert one_batch.loss_weight.tolist() == other.loss_weight.tolist() == [1.0] * 8
        assert one_batch.tokens.tolist() == other.tokens.tolist()
