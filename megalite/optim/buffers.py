"""Flat parameter and gradient buffers of one model chunk, cut into buckets.

Parameters are re-pointed into one flat buffer, their main gradients live in another one of the
same layout, so that a collective or an optimizer kernel sees a few long ranges and not thousands
of tensors. Buckets lie in reverse use order: backward fills the first bucket first. This module
only lays memory out; it communicates nothing and updates nothing.

Alignment rule: every parameter starts at a multiple of `ALIGN` elements and every bucket is a
multiple of `ALIGN * num_shards` long. Then a shard never starts inside a vector register, and an
element's update cannot depend on where in the buffer it lies: replicas stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megalite.distributed.precision import main_grad_dtype
from megalite.sharding import ShardSpec

ALIGN = 16  # elements: one 64-byte cache line of fp32, two of fp64


class GradSink(Protocol):
    """The part of a chunk's gradient store that the optimizer uses."""

    listener: Callable[[nn.Parameter], None] | None

    def bind(self, param: nn.Parameter, buffer: Tensor) -> None: ...


class Chunk(Protocol):
    """What the optimizer needs of a model chunk: a duck type, so that no model is imported."""

    before: Callable[[int], None] | None

    @property
    def grads(self) -> GradSink: ...

    def named_params(self) -> list[tuple[nn.Parameter, ShardSpec]]: ...

    def sections(self) -> list[list[nn.Parameter]]: ...


@dataclass(frozen=True)
class BucketPlan:
    """Where one bucket lies, in elements of the flat buffer; `items` index the planned sequence."""

    start: int
    stop: int
    items: tuple[int, ...]
    starts: tuple[int, ...]
    alone: bool  # a tied weight: both stages must cut it alike, so nothing may lie beside it


@dataclass(frozen=True)
class Slot:
    """One parameter's place [start, stop) in the flat buffers, in elements."""

    param: nn.Parameter
    spec: ShardSpec
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """A contiguous range of the flat buffers that is reduced and gathered as one."""

    start: int
    stop: int
    slots: tuple[Slot, ...]
    shared: bool

    def shard_range(self, num_shards: int, index: int) -> tuple[int, int]:
        """The `index`-th of `num_shards` equal parts, in elements of the flat buffer."""
        size = (self.stop - self.start) // num_shards
        return self.start + index * size, self.start + (index + 1) * size


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def plan_buckets(
    numels: Sequence[int], alone: Sequence[bool], capacity: int, num_shards: int
) -> list[BucketPlan]:
    """Cut a sequence of parameters into buckets of at most `capacity` elements, padding included.

    A parameter larger than `capacity`, and each one marked `alone`, gets a bucket of its own.
    """
    buckets: list[BucketPlan] = []
    items: list[int] = []
    starts: list[int] = []
    start = end = 0

    def close(is_alone: bool = False) -> None:
        nonlocal start, end
        if items:
            end = start + _round_up(end - start, ALIGN * num_shards)
            buckets.append(BucketPlan(start, end, tuple(items), tuple(starts), is_alone))
            items.clear()
            starts.clear()
            start = end

    for item, numel in enumerate(numels):
        if alone[item] or end + numel - start > capacity:
            close()
        items.append(item)
        starts.append(end)
        end = _round_up(end + numel, ALIGN)
        if alone[item]:
            close(is_alone=True)
    close()
    return buckets


class ChunkBuffers:
    """The flat buffers of one chunk. Building one re-points the chunk's parameters into it.

    `bucket_mb` is MiB of main gradients. `params` and `grads` have equal length and layout;
    a chunk without parameters has buffers of length 0 and no buckets.
    """

    def __init__(
        self,
        chunk: Chunk,
        dtype: torch.dtype,
        device: torch.device,
        bucket_mb: float,
        num_shards: int,
    ) -> None:
        grad_dtype = main_grad_dtype(dtype)
        named = list(reversed(chunk.named_params()))
        plans = plan_buckets(
            [param.numel() for param, _ in named],
            [spec.shared for _, spec in named],
            int(bucket_mb * 2**20) // grad_dtype.itemsize,
            num_shards,
        )
        self.buckets = [_bucket(plan, named) for plan in plans]
        self.numel = plans[-1].stop if plans else 0
        self.num_parameters = sum(param.numel() for param, _ in named)
        self.params = torch.zeros(self.numel, dtype=dtype, device=device)
        self.grads = torch.zeros(self.numel, dtype=grad_dtype, device=device)
        for bucket in self.buckets:
            for slot in bucket.slots:
                self._adopt(slot, chunk.grads)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - self.num_parameters

    def _adopt(self, slot: Slot, sink: GradSink) -> None:
        param, dtype = slot.param, self.params.dtype
        assert param.dtype == dtype, f"{slot.spec.name} is {param.dtype}, the optimizer's {dtype}"
        view = self.params[slot.start : slot.stop].view(param.shape)
        view.copy_(param.detach())
        param.data = view
        sink.bind(param, self.grads[slot.start : slot.stop].view(param.shape))


def _bucket(plan: BucketPlan, named: Sequence[tuple[nn.Parameter, ShardSpec]]) -> Bucket:
    slots = tuple(
        Slot(named[item][0], named[item][1], start, start + named[item][0].numel())
        for item, start in zip(plan.items, plan.starts, strict=True)
    )
    return Bucket(plan.start, plan.stop, slots, plan.alone)
