"""The order of samples: a permutation each epoch, pure, seekable, and never changed silently."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megalite.data.sampler import Permutation, SampleOrder
from megalite.errors import ConfigError, DataError
from tests.data.kit import PROPERTY

SIZES = st.integers(1, 700)
COUNTS = st.lists(st.integers(0, 60), max_size=5)
SEEDS = st.integers(0, 2**64 - 1)


@PROPERTY
@given(size=SIZES, seed=SEEDS, epoch=st.integers(0, 2**40))
def test_each_epoch_holds_each_sample_once(size: int, seed: int, epoch: int) -> None:
    values = SampleOrder(size, seed).at(epoch * size, size)
    assert sorted(values.tolist()) == list(range(size))


@PROPERTY
@given(size=SIZES, seed=SEEDS, first=st.integers(0, 5000), counts=COUNTS)
def test_order_does_not_depend_on_how_it_is_asked_for(
    size: int, seed: int, first: int, counts: list[int]
) -> None:
    order = SampleOrder(size, seed)
    parts, at = [], first
    for count in counts:
        parts += order.at(at, count).tolist()
        at += count
    assert parts == SampleOrder(size, seed).at(first, sum(counts)).tolist()


@pytest.mark.parametrize(("first", "count"), [(0, 5000), (1000, 48), (1023, 2), (4990, 2100)])
def test_blocks_are_the_permutation_itself(first: int, count: int) -> None:
    order, found = SampleOrder(5000, 7), SampleOrder(5000, 7).at(first, count)
    epochs = [Permutation(5000, 7, epoch).at(np.arange(5000)) for epoch in range(2)]
    assert found.tolist() == np.concatenate(epochs)[first : first + count].tolist()
    backwards = [int(order.at(first + n, 1)[0]) for n in reversed(range(0, count, 97))]
    assert backwards[::-1] == found[::97].tolist()


@pytest.mark.parametrize("size", [10, 100, 1000])
def test_epochs_and_seeds_differ(size: int) -> None:
    orders = {
        SampleOrder(size, seed).at(epoch * size, size).tobytes()
        for seed in range(8)
        for epoch in range(8)
    }
    assert len(orders) == 64


def test_small_sets_reach_every_order() -> None:
    orders = {tuple(SampleOrder(3, 7).at(3 * epoch, 3).tolist()) for epoch in range(60)}
    assert len(orders) == 6


def test_order_looks_random() -> None:
    size = 20_000
    order = SampleOrder(size, 3)
    first, second = order.at(0, size), order.at(size, size)
    for left, right in ((first, np.arange(size)), (first[1:], first[:-1]), (first, second)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / np.sqrt(size)  # five sigma; seed is fixed


@pytest.mark.parametrize("global_batch", [1, 3, 4, 7, 10])
def test_batches_cross_epochs_without_loss_or_padding(global_batch: int) -> None:
    order = SampleOrder(3, 5)  # fewer samples than most batches
    ids = np.concatenate([order.at(step * global_batch, global_batch) for step in range(3 * 4)])
    epochs = ids.reshape(-1, 3)
    assert all(sorted(epoch) == [0, 1, 2] for epoch in epochs.tolist())


def test_without_shuffling_samples_come_in_order() -> None:
    assert SampleOrder(5, 1, shuffle=False).at(3, 9).tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]


GOLDEN = {
    (1, 0): "56a43ef88ddfcd0f56f7dd973312c0e73d62f59655c01d7b4e59aaa3be8b3fb6",
    (10, 0): "049220c312e3445c51c4f67d84dd892f91cb49efa640adbcdf3753127caf1d26",
    (1_000_003, 1234): "fabfd2d4fc79cbf443476a7570e444ff7e73c417b0b7c9f3985600e55181a21f",
}


@pytest.mark.parametrize(("size", "seed"), GOLDEN)
def test_golden_order(size: int, seed: int) -> None:
    """A change here changes the data order of every run that is resumed."""
    order = SampleOrder(size, seed)
    parts = [order.at(0, 400), order.at(5 * size + size // 2, 400)]
    content = b"".join(part.astype("<i8").tobytes() for part in parts)
    assert hashlib.sha256(content).hexdigest() == GOLDEN[size, seed]


def test_seek_into_a_huge_set_evaluates_a_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = 0
    network = Permutation._network

    def counting(self: Permutation, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        nonlocal evaluated
        evaluated += len(values)
        return network(self, values)

    monkeypatch.setattr(Permutation, "_network", counting)
    size = 2**41 + 12_345  # the domain is nearly twice as large: walks of two on average
    ids = SampleOrder(size, 9).at(2**52 * 64, 64)
    assert len(set(ids.tolist())) == 64
    assert 0 <= ids.min() <= ids.max() < size
    assert ids.max() > 2**32
    assert evaluated < 2 * 1024 * 8  # the blocks that hold the batch


@pytest.mark.parametrize("size", [0, -1, 2**62])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(DataError, match=f"num_samples={size}"):
        SampleOrder(size, 0)


def test_bad_seed_and_position_are_refused() -> None:
    with pytest.raises(ConfigError, match="seed=-1"):
        SampleOrder(10, -1)
    with pytest.raises(ConfigError, match="position -4"):
        SampleOrder(10, 0).at(-4, 4)
    with pytest.raises(ConfigError, match="position"):
        SampleOrder(10, 0).at(2**62 * 4, 4)
