"""Bucket layout and flat buffers: pure arithmetic and memory, one process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megalite.config import OptimizerConfig
from megalite.layout.bucket_plan import ALIGN, plan_buckets
from megalite.layout.sharding import ShardSpec
from megalite.layout.topology import Topology
from megalite.optim.buffers import ChunkBuffers
from megalite.tensor_parallel.grads import GradStore


def mesh_of(dp: int) -> Any:
    """What the buffers ask of a mesh of `dp` replicas."""
    axis = SimpleNamespace(size=dp, rank=0)
    return SimpleNamespace(topology=Topology(dp=dp), axis=lambda kind: axis)


class ListChunk:
    """A chunk made of a list of parameters."""

    def __init__(self, params: list[tuple[nn.Parameter, ShardSpec]]) -> None:
        self._params = params
        self.grads = GradStore()
        self.before_section: Callable[[int], None] | None = None

    def named_params(self) -> list[tuple[nn.Parameter, ShardSpec]]:
        return self._params

    def sections(self) -> list[list[nn.Parameter]]:
        return [[param] for param, _ in self._params]


@given(
    items=st.lists(st.tuples(st.integers(1, 500), st.booleans()), max_size=30),
    capacity=st.integers(1, 1000),
    num_shards=st.integers(1, 9),
)
def test_plan_covers_every_parameter_once_aligned(
    items: list[tuple[int, bool]], capacity: int, num_shards: int
) -> None:
    numels = [numel for numel, _ in items]
    alone = [flag for _, flag in items]
    plans = plan_buckets(numels, alone, capacity, num_shards)
    assert [item for plan in plans for item in plan.items] == list(range(len(items)))
    end = 0
    for plan in plans:
        assert plan.start == end
        assert (plan.stop - plan.start) % (ALIGN * num_shards) == 0
        end = plan.stop
        used = plan.start
        for item, start in zip(plan.items, plan.starts, strict=True):
            assert start % ALIGN == 0
            assert used <= start < used + ALIGN
            used = start + numels[item]
        assert used <= plan.stop < used + ALIGN * (num_shards + 1)
        assert len(plan.items) == 1 or used - plan.start <= capacity
        assert plan.tied == any(alone[item] for item in plan.items)
        assert not plan.tied or len(plan.items) == 1


def test_tied_weight_is_laid_out_alike_on_both_stages() -> None:
    first = plan_buckets([33, 7, 100], [False, False, True], 10_000, 3)
    last = plan_buckets([100, 12, 700, 3], [True, False, False, False], 10_000, 3)
    a, b = first[-1], last[0]
    assert a.tied
    assert b.tied
    assert a.stop - a.start == b.stop - b.start


def buffers_of(
    chunk: ListChunk, bucket_mb: float, dp: int, dtype: torch.dtype = torch.float32
) -> ChunkBuffers:
    config = OptimizerConfig(bucket_mb=bucket_mb)
    return ChunkBuffers(chunk, dtype, torch.device("cpu"), config, mesh_of(dp))


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_parameters_move_into_the_buffer_in_reverse_order(
    dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    first = nn.Parameter(torch.arange(6, dtype=dtype).view(2, 3))
    last = nn.Parameter(torch.arange(5, dtype=dtype) + 10)
    chunk = ListChunk([(first, ShardSpec("a", (2, 3))), (last, ShardSpec("b", (5,)))])
    buffers = buffers_of(chunk, 1.0, 2, dtype)
    assert buffers.params[:5].tolist() == [10, 11, 12, 13, 14]
    assert buffers.params[16:22].tolist() == [0, 1, 2, 3, 4, 5]
    assert buffers.numel == 32
    assert (buffers.num_parameters, buffers.padding) == (11, 21)
    buffers.params.zero_()
    assert first.abs().sum() == 0
    assert first.shape == (2, 3)
    chunk.grads.add(first, lambda buffer: buffer.add_(1.0))
    assert buffers.grads.dtype == grad_dtype
    assert buffers.grads.sum() == 6
    assert buffers.grads[16:22].tolist() == [1.0] * 6


def test_chunk_without_parameters() -> None:
    buffers = buffers_of(ListChunk([]), 1.0, 4)
    assert buffers.numel == buffers.padding == 0
    assert buffers.buckets == []


def test_small_buckets_hold_one_parameter_each() -> None:
    params = [(nn.Parameter(torch.ones(40)), ShardSpec(str(i), (40,))) for i in range(5)]
    tiny = buffers_of(ListChunk(params), 1e-5, 2)
    assert [len(bucket.slots) for bucket in tiny.buckets] == [1] * 5
    assert [bucket.slots[0].spec.name for bucket in tiny.buckets] == ["4", "3", "2", "1", "0"]
