"""Samples, splits, microbatches: every label once, the same order at every layout."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.batches import PADDING, Batches, MicroBatch
from megalite.data.dataset import TokenDataset
from megalite.errors import ConfigError, DataError
from megalite.run.batch_plan import BatchPlan, BatchStage
from tests.data.kit import PROPERTY, index_bytes, write_dataset

Make = Callable[..., Path]
Stream = Callable[[int], Path]


def step_batches(
    batches: Batches, step: int, global_batch: int, micro_batch: int, dp: int
) -> list[MicroBatch]:
    """All microbatches of a step, in global order."""
    first = step * global_batch
    return [
        batch
        for rank in range(dp)
        for batch in batches.rank_batches(first, global_batch, micro_batch, rank, dp)
    ]


def one(batches: Batches, first_sample: int, count: int = 1) -> MicroBatch:
    """`count` samples of the run as one microbatch."""
    return batches.rank_batches(first_sample, count, count, 0, 1)[0]


@pytest.mark.parametrize(
    ("tokens", "samples"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (25, 3)]
)
def test_sample_count(make_stream: Stream, tokens: int, samples: int) -> None:
    span = TokenDataset(make_stream(tokens)).span()
    assert span.num_samples(8) == samples
    if samples:
        assert Batches(span, 8, seed=1).num_samples == samples
    else:
        with pytest.raises(DataError, match=f"all gets {tokens} of {tokens} tokens"):
            Batches(span, 8, seed=1)


@PROPERTY
@given(tokens=st.integers(2, 120), seq_length=st.integers(1, 20), seed=st.integers(0, 99))
def test_every_token_is_a_label_exactly_once_per_epoch(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, seq_length: int, seed: int
) -> None:
    prefix = write_dataset(tmp_path_factory.mktemp("d") / "x", [range(tokens)])
    samples = (tokens - 1) // seq_length
    if samples == 0:
        return
    batches = Batches(TokenDataset(prefix).span(), seq_length, seed)
    for epoch in range(2):
        parts = [one(batches, epoch * samples + n) for n in range(samples)]
        labels = torch.cat([part.labels for part in parts])
        assert sorted(labels.tolist()) == list(range(1, samples * seq_length + 1))
        for part in parts:
            assert torch.equal(part.labels, part.tokens + 1)


@pytest.mark.parametrize("document_masks", [False, True])
def test_layouts_give_the_same_samples_in_the_same_order(make: Make, document_masks: bool) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 900, size=rng.integers(0, 9)).tolist() for _ in range(40)]
    span = TokenDataset(make(documents)).span()
    batches = Batches(span, 8, seed=3, document_masks=document_masks)
    for step in (0, 1, 7):
        whole = one(batches, step * 8, 8)
        for dp, micro_batch in ((1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)):
            parts = step_batches(batches, step, 8, micro_batch, dp)
            for name in ("tokens", "labels", "loss_weight"):
                joined = torch.cat([getattr(part, name) for part in parts])
                assert torch.equal(joined, getattr(whole, name))
            ids = np.concatenate([part.sample_ids for part in parts])
            assert ids.tolist() == batches.sample_ids(step * 8, 8).tolist()
            starts = [
                start + index * 8 * micro_batch
                for index, part in enumerate(parts)
                for start in part.cu_seqlens.tolist()[:-1]
            ]
            assert [*starts, 64] == whole.cu_seqlens.tolist()


def test_types_and_plain_boundaries(make_stream: Stream) -> None:
    batches = Batches(TokenDataset(make_stream(100)).span(), 8, seed=1)
    part, _ = batches.rank_batches(0, 12, 3, 0, 2)
    assert part.tokens.dtype == part.labels.dtype == torch.int64
    assert part.loss_weight.dtype == torch.float32
    assert part.cu_seqlens.dtype == torch.int32
    assert part.tokens.shape == part.labels.shape == part.loss_weight.shape == (24,)
    assert part.cu_seqlens.tolist() == [0, 8, 16, 24]
    assert part.loss_weight.min() == 1
    assert part.tokens.is_contiguous()
    assert part.labels.is_contiguous()


def test_document_masks_by_hand(make: Make) -> None:
    # tokens 0 1 2 | 3 4 5 6 | (an empty document) | 7 8 9; the last of each is its end token
    prefix = make([[0, 1, 2], [3, 4, 5, 6], [], [7, 8, 9]])
    span = TokenDataset(prefix).span()
    batches = Batches(span, 3, seed=0, shuffle=False, document_masks=True)
    part = one(batches, 0, 3)
    assert part.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert part.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert part.loss_weight.tolist() == [1, 1, 0, 1, 1, 1, 0, 1, 1]
    assert part.cu_seqlens.tolist() == [0, 3, 6, 7, 9]


@PROPERTY
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=30),
    seq_length=st.integers(1, 9),
    shares=st.sampled_from([(1, 0), (0.7, 0.3), (0.5, 0.5)]),
)
def test_document_masks_equal_a_plain_count(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_length: int,
    shares: tuple[float, float],
) -> None:
    """Against a list that holds, for each token of the stream, its document."""
    owners = [number for number, length in enumerate(lengths) for _ in range(length)]
    documents = [[number] * length for number, length in enumerate(lengths)]
    data = TokenDataset(write_dataset(tmp_path_factory.mktemp("d") / "x", documents))
    stop = int(data.num_tokens * shares[0])
    if (stop - 1) // seq_length < 1 or (shares[1] and len(owners) - stop <= seq_length):
        return
    for span in data.split(shares, seq_length).values():
        batches = Batches(span, seq_length, 0, shuffle=False, document_masks=True)
        for sample in range(batches.num_samples):
            part = one(batches, sample)
            first = span.start + sample * seq_length
            owned = owners[first : first + seq_length + 1]
            same = [float(left == right) for left, right in itertools.pairwise(owned)]
            assert part.loss_weight.tolist() == same
            starts = [n for n in range(1, seq_length) if owned[n] != owned[n - 1]]
            assert part.cu_seqlens.tolist() == [0, *starts, seq_length]


def test_three_samples_and_a_batch_of_four(make_stream: Stream) -> None:
    batches = Batches(TokenDataset(make_stream(25)).span(), 8, seed=2)
    flat = [sample for step in range(3) for sample in batches.sample_ids(4 * step, 4).tolist()]
    assert [sorted(flat[n : n + 3]) for n in range(0, 12, 3)] == [[0, 1, 2]] * 4


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_a_pass_fills_its_last_batch_with_padding_never_with_a_sample(
    make_stream: Stream, dp: int, micro_batch: int
) -> None:
    data = TokenDataset(make_stream(6 * 8 + 1))
    batches = Batches(data.span(), 8, seed=2, once=True)
    assert BatchPlan((BatchStage(0, 0, 4),)).steps_for(batches.num_samples) == 2
    parts = [b for step in range(2) for b in step_batches(batches, step, 4, micro_batch, dp)]
    ids = np.concatenate([part.sample_ids for part in parts])
    assert sorted(ids[:6].tolist()) == list(range(6))
    assert ids[6:].tolist() == [PADDING] * 2
    weight = torch.cat([part.loss_weight for part in parts])
    assert weight.tolist() == [1.0] * 48 + [0.0] * 16
    labels = torch.cat([part.labels for part in parts])
    assert sorted(labels[:48].tolist()) == list(range(1, 49))
    assert labels[48:].tolist() == [0] * 16
    with pytest.raises(DataError, match="sample 8 asked for; there are 6, and each is taken once"):
        batches.rank_batches(8, 4, 1, 0, 1)


def test_split_is_contiguous_exact_and_relative(make_stream: Stream) -> None:
    data = TokenDataset(make_stream(1000))
    for shares in ((0.75, 0.25), (3, 1), (7500, 2500)):
        train, validation = data.split(shares, 8).values()
        assert (train.start, train.stop) == (0, 750)
        assert (validation.start, validation.stop) == (750, 1000)
    first = one(Batches(validation, 8, 1, shuffle=False), 0)
    assert first.tokens.tolist() == list(range(750, 758))
    assert list(data.split((1, 0), 8)) == ["train"]
    spans = data.split("8,1,1", 8)
    assert [(s.name, s.start, s.stop) for s in spans.values()] == [
        ("train", 0, 800),
        ("validation", 800, 900),
        ("test", 900, 1000),
    ]


def test_split_without_a_sample_is_refused_by_name(make: Make) -> None:
    data = TokenDataset(make([[1, 2, 3, 4]] * 20))
    with pytest.raises(DataError) as caught:
        data.split("9998,0.002,0.002", 8)
    message = str(caught.value)
    for part in ("validation gets 0 of 80 tokens in 20 documents", "(9998.0, 0.002, 0.002)"):
        assert part in message
    with pytest.raises(DataError, match=r"test gets 1 of 80 .* which is no sample"):
        data.split((60, 19, 0.1), 8)
    with pytest.raises(DataError, match="train gets 0 of 80"):
        data.split((1, 1e12), 8)


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_split_of_too_little_data_is_refused(make_stream: Stream, tokens: int) -> None:
    with pytest.raises(DataError, match=f"train gets {tokens} of {tokens} tokens"):
        TokenDataset(make_stream(tokens)).split((1, 0), 8)


@pytest.mark.parametrize(
    "shares",
    [
        (),
        (1,),
        (1, 1, 1, 1),
        (0, 0),
        (0, 1),
        (0.9, 0.2),
        (-1, 2),
        (float("nan"), 1),
        (float("inf"), 1),
        ("1", 1),
        (True, 1),
        "98",
        "98,",
        "98;2",
        "98,two",
        "98,nan",
        "9_8,2",
        98,
        None,
    ],
)
def test_split_is_parsed_strictly(make_stream: Stream, shares: object) -> None:
    with pytest.raises(DataError, match=r"data\.split="):
        TokenDataset(make_stream(100)).split(shares, 8)


def test_batch_sizes_that_do_not_divide_are_refused(make_stream: Stream) -> None:
    batches = Batches(TokenDataset(make_stream(100)).span(), 8, seed=1)
    with pytest.raises(ConfigError, match=r"global_batch=6 is not divisible by dp=4"):
        batches.rank_batches(0, 6, 1, 0, 4)
    with pytest.raises(ConfigError, match=r"micro_batch=2 does not divide the 3 samples"):
        batches.rank_batches(0, 6, 2, 0, 2)
    with pytest.raises(ConfigError, match="dp rank 2; must be 0 to 1"):
        batches.rank_batches(0, 6, 1, 2, 2)
    with pytest.raises(DataError, match="sample -6 asked for"):
        batches.rank_batches(-6, 6, 1, 0, 2)
    with pytest.raises(ConfigError, match="seq_length=0"):
        Batches(TokenDataset(make_stream(100)).span(), 0, seed=1)


def test_reading_beyond_two_to_the_32_tokens(tmp_path: Path) -> None:
    """A sparse file: sizes are real, contents are holes but for the marked place."""
    lengths = [2**31 - 1] * 3
    total = sum(lengths)
    (tmp_path / "a.idx").write_bytes(index_bytes(lengths, [0, 1, 2, 3], code=4, item_bytes=4))
    with (tmp_path / "a.bin").open("wb") as stream:
        stream.truncate(4 * total)
        stream.seek(4 * (total - 10))
        stream.write(struct.pack("<10i", *range(10)))
    data = TokenDataset(tmp_path / "a")
    assert data.num_tokens == total
    batches = Batches(data.span(), 16, 1, shuffle=False, document_masks=True)
    assert batches.num_samples == (total - 1) // 16
    sample = 2 * (2**31 - 1) // 16  # holds the start of the third document
    part = one(batches, sample)
    start = 2 * (2**31 - 1) - sample * 16
    assert part.cu_seqlens.tolist() == [0, start, 16]
    assert part.loss_weight.tolist() == [float(n != start - 1) for n in range(16)]
    last = one(batches, batches.num_samples - 1)
    first = (batches.num_samples - 1) * 16
    wanted = [max(0, first + n - (total - 10)) for n in range(1, 17)]
    assert last.labels.tolist() == wanted


def test_multimodal_and_fractional_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(np.arange(4, dtype="<u2").tobytes())
    (tmp_path / "a.idx").write_bytes(index_bytes([4], [0, 1], modes=[1]))
    with pytest.raises(DataError, match="holds modes"):
        TokenDataset(tmp_path / "a")
    (tmp_path / "a.bin").write_bytes(np.arange(4, dtype="<f4").tobytes())
    (tmp_path / "a.idx").write_bytes(index_bytes([4], [0, 1], code=7, item_bytes=4))
    with pytest.raises(DataError, match="dtype: found float32, wanted integers"):
        TokenDataset(tmp_path / "a")
