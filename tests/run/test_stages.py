"""Layers over stages: none lost, and no spread has a smaller largest stage."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megalite.errors import ConfigError
from megalite.run.stages import head_cost_layers, spread_layers, stage_layer_counts, stage_problems

COSTS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.7, 3.0, 10.0])


def config(num_layers: int, **parallel: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(
            num_layers=num_layers, hidden_size=8, num_heads=2, ffn_hidden_size=8, vocab_size=8
        ),
        parallel=ParallelConfig(**parallel),
        data=DataConfig(seq_length=8),
        train=TrainConfig(steps=1, global_batch=1),
    )


def all_spreads(num_layers: int, num_stages: int) -> list[list[int]]:
    """Every way to write num_layers as num_stages counts >= 0 (cuts between stars and bars)."""
    slots = num_layers + num_stages - 1
    spreads = []
    for bars in combinations(range(slots), num_stages - 1):
        edges = [-1, *bars, slots]
        spreads.append([b - a - 1 for a, b in pairwise(edges)])
    return spreads


def largest(counts: list[int], extra: list[float]) -> float:
    return max(count + load for count, load in zip(counts, extra, strict=True))


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 4), COSTS, COSTS)
def test_layers_are_conserved(
    layers: int, pp: int, vpp: int, embedding: float, head: float
) -> None:
    extra = [0.0] * (pp * vpp)
    extra[0] += embedding
    extra[-1] += head
    counts = spread_layers(layers, extra)
    assert sum(counts) == layers
    assert len(counts) == pp * vpp
    assert min(counts) >= 0
    middle = counts[1:-1]
    assert not middle or max(middle) - min(middle) <= 1


@given(st.integers(1, 8), st.integers(1, 5), COSTS, COSTS)
def test_no_spread_has_a_smaller_largest_stage(
    layers: int, stages: int, embedding: float, head: float
) -> None:
    extra = [0.0] * stages
    extra[0] += embedding
    extra[-1] += head
    best = min(largest(counts, extra) for counts in all_spreads(layers, stages))
    assert largest(spread_layers(layers, extra), extra) == best


@pytest.mark.parametrize(
    ("layers", "parallel", "counts"),
    [
        (4, {}, [4]),
        (8, {"pp": 4}, [2, 2, 2, 2]),
        (5, {"pp": 2}, [3, 2]),
        (6, {"pp": 2, "vpp": 2}, [1, 2, 2, 1]),
        (32, {"pp": 2, "vpp": 4, "head_layers": 2.1}, [4, 4, 4, 4, 4, 5, 5, 2]),
        (6, {"pp": 4, "embedding_layers": 1.0, "head_layers": 1.0}, [1, 2, 2, 1]),
        # the head alone is worth more than a layer: its stage may stay empty
        (3, {"pp": 4, "head_layers": 5.0}, [1, 1, 1, 0]),
        (1, {"pp": 2, "embedding_layers": 0.1}, [0, 1]),
        # written out, a stage may be empty anywhere
        (1, {"pp": 2, "stage_layers": [1, 0]}, [1, 0]),
        (2, {"pp": 2, "vpp": 2, "stage_layers": [1, 0, 0, 1]}, [1, 0, 0, 1]),
    ],
)
def test_known_spreads(layers: int, parallel: dict[str, Any], counts: list[int]) -> None:
    assert stage_layer_counts(config(layers, **parallel)) == counts


@pytest.mark.parametrize(
    ("layers", "parallel", "words"),
    [
        (1, {"pp": 2}, "use at most 1 stage, at least 2 layers"),
        (3, {"pp": 2, "vpp": 2}, r"use at most 3 stages \(parallel.vpp=1 or fewer\), at least 4"),
        (1, {"pp": 4, "embedding_layers": 1.0, "head_layers": 1.0}, "at least 2 layers"),
        (2, {"pp": 2, "stage_layers": [1, 0]}, "adds up to 1 layer, model.num_layers=2; add 1"),
        (2, {"stage_layers": [1, 1]}, "has 2 entries, .* = 1 stage needs 1"),
    ],
)
def test_refusals_say_what_fits(layers: int, parallel: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stage_layer_counts(config(layers, **parallel))


def test_advice_about_layers_is_enough() -> None:
    assert stage_layer_counts(config(2, pp=4, embedding_layers=1.0, head_layers=1.0)) == [
        0,
        1,
        1,
        0,
    ]
    assert stage_layer_counts(config(3, pp=3)) == [1, 1, 1]


def test_the_head_counts_what_its_flops_are_worth() -> None:
    """A layer: 2 x 8 x (4 + 3) x 8 products and causal scores 2 x 8 x 8; the head: 2 x 8 x V."""
    even = config(16, pp=4)
    wide = even.model.model_copy(update={"vocab_size": 96})
    balanced = even.model_copy(
        update={"model": wide, "parallel": ParallelConfig(pp=4, balance="cost")}
    )
    assert head_cost_layers(balanced) == 2 * 8 * 96 / (2 * 8 * 7 * 8 + 2 * 8 * 8)
    assert stage_layer_counts(even) == [4, 4, 4, 4]
    assert stage_layer_counts(balanced) == [4, 4, 5, 3]
    assert stage_problems(balanced) == []
