"""Dropout masks: the written recipe, known answers, and what a mask must look like."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megalite import kernels
from megalite.model.dropout import DropoutAt
from tests.model.kit import masks

KEY = (0x9E3779B9, 0xDEADBEEF)


def mask(p=0.5, rows=1024, columns=1024, key=KEY, first=0):
    token = torch.arange(first, first + rows).unsqueeze(1)
    return kernels.dropout_mask(key, p, token, torch.arange(columns))


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("first", [0, 2**31 - 3, 2**32 - 3, 2**40 + 5])
def test_masks_follow_the_recipe(p, first) -> None:
    """Against numpy's unsigned words, over the edges of signed and of 32-bit counters."""
    token, column = np.arange(first, first + 7)[:, None], np.arange(2**31 - 4, 2**31 + 4)
    plane = np.array([0, 1, 2**20])[:, None, None]
    got = kernels.dropout_mask(KEY, p, *(torch.from_numpy(a) for a in (token, column, plane)))
    assert got.shape == (3, 7, 8)
    assert torch.equal(got, masks.mask(KEY, p, token, column, plane))


def test_known_answers() -> None:
    """Written down once: these bits are part of every run with dropout, and may never change."""
    bits = mask(0.25, 4, 32, first=1000).long()
    words = [int("".join(str(b) for b in row), 2) for row in bits.tolist()]
    assert [f"{word:08x}" for word in words] == ["afbcf6ab", "7e7fadfd", "f7dfd762", "6cff79ff"]
    assert DropoutAt(1, 2, 0).key(3, "mlp output") == (0x6A89CAAF, 0x773E0B36)


def test_share_of_kept_elements() -> None:
    for p in (0.01, 0.1, 0.5, 0.9):
        kept = mask(p).double()
        noise = (p * (1 - p)) ** 0.5
        assert abs(float(kept.mean()) - (1 - p)) < 5 * noise / 1024
        for dim in (0, 1):  # no row and no column stands out: 2,048 means, 5.5 sigma
            assert (kept.mean(dim) - (1 - p)).abs().max() < 5.5 * noise / 32


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of two masks of probability one half, in standard deviations from none."""
    a, b = a.double() * 2 - 1, b.double() * 2 - 1
    return float((a * b).mean()) * a.numel() ** 0.5


def test_neighbours_are_independent() -> None:
    kept = mask()
    for shift in (1, 2, 3, 16, 64, 256, 512):
        assert abs(correlation(kept[shift:], kept[:-shift])) < 5
        assert abs(correlation(kept[:, shift:], kept[:, :-shift])) < 5
        assert abs(correlation(kept[shift:, shift:], kept[:-shift, :-shift])) < 5
    pair = kept[1:] ^ kept[:-1]  # four corners of a square: XOR of rows says nothing of columns
    assert abs(correlation(pair[:, 1:], pair[:, :-1])) < 5
    assert abs(correlation(pair[:, 64:], pair[:, :-64])) < 5


def test_pairs_of_rows_are_correlated_as_chance_has_it() -> None:
    signs = mask(rows=400, columns=4096).double() * 2 - 1
    between = (signs @ signs.t()) / 64
    between.fill_diagonal_(0)
    assert between.abs().max() < 5.7  # 79,800 pairs
    assert abs(float(between[between != 0].square().mean()) - 1) < 0.03


@pytest.mark.parametrize(
    "other",
    [
        DropoutAt(5, 7, 0).key(3, "attention"),
        DropoutAt(4, 8, 0).key(3, "attention"),
        DropoutAt(4, 7, 0).key(2, "attention"),
        DropoutAt(4, 7, 0).key(3, "embedding"),
        (1, 0),
    ],
    ids=["seed", "step", "layer", "kind", "words"],
)
def test_another_use_has_another_mask(other) -> None:
    one = DropoutAt(4, 7, 0).key(3, "attention") if other != (1, 0) else (0, 0)
    assert other != one
    assert abs(correlation(mask(key=one), mask(key=other))) < 5


def test_heads_have_masks_of_their_own() -> None:
    token, column = torch.arange(256).unsqueeze(1), torch.arange(256)
    planes = torch.arange(8)[:, None, None]
    kept = kernels.dropout_mask(KEY, 0.5, token, column, planes)
    for i in range(8):
        for j in range(i):
            assert abs(correlation(kept[i], kept[j])) < 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_kept_is_scaled_up(dtype) -> None:
    x = torch.ones(64, 64, dtype=dtype)
    keep = mask(0.2, 64, 64)
    y = kernels.dropout(x, keep, 0.2)
    assert y.dtype == dtype
    assert torch.equal(y == 0, ~keep)
    assert (y[keep] == torch.tensor(1.25, dtype=dtype)).all()
    assert (x == 1).all()


def test_no_generator_is_touched() -> None:
    before = torch.get_rng_state()
    mask(0.5, 8, 8)
    assert torch.equal(torch.get_rng_state(), before)
