"""This rank's part of a chunk's optimizer state, as views: what it updates, counts and saves.

Of every bucket a rank owns one of `num_shards` equal parts (all of it with ZeRO off). For bf16
parameters the part has an fp32 master; for fp32 and fp64 the weight *is* the parameter's own
memory, so no number is stored twice. Moments exist for the owned part only. No communication here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megalite.optim.adamw import Run
from megalite.optim.buffers import Bucket, ChunkBuffers, Slot
from megalite.sharding import ShardSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """The owned part of one parameter: [start, stop) of its flat, row-major, tp-local values."""

    slot: Slot
    start: int
    stop: int
    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def spec(self) -> ShardSpec:
        return self.slot.spec


@dataclass(frozen=True)
class BucketShard:
    """The owned part of one bucket: elements [start, stop) of the flat buffers, all 1-D views.

    `param` is in the parameter type; `weight` is the master (bf16) or the very same memory.
    """

    bucket: Bucket
    start: int
    stop: int
    param: Tensor
    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def runs(self) -> list[Run]:
        """The fewest contiguous ranges to update, each with weight decay on or off.

        Frozen parameters (`requires_grad` off) are in none: decay would move them, too.
        """
        return [
            Run(self.weight[i:j], self.grad[i:j], self.exp_avg[i:j], self.exp_avg_sq[i:j], decay)
            for i, j, (trained, decay) in self.split(
                lambda slot: (slot.param.requires_grad, slot.spec.decay)
            )
            if trained
        ]

    def split(self, key: Callable[[Slot], T]) -> list[tuple[int, int, T]]:
        """Cut the shard where `key` changes: (start, stop, key) relative to the shard.

        Padding goes with the parameter before it; its values are zero and stay zero.
        """
        cuts: list[tuple[int, int, T]] = []
        slots = self.bucket.slots
        ends = [*(slot.start for slot in slots[1:]), self.bucket.stop]
        for slot, end in zip(slots, ends, strict=True):
            low, high = max(slot.start, self.start), min(end, self.stop)
            if low >= high:
                continue
            value = key(slot)
            first = low - self.start
            if cuts and cuts[-1][2] == value:
                first = cuts.pop()[0]
            cuts.append((first, high - self.start, value))
        return cuts

    def pieces(self) -> list[Piece]:
        """The owned part of each parameter that has one, without padding."""
        found: list[Piece] = []
        for slot in self.bucket.slots:
            low, high = max(slot.start, self.start), min(slot.stop, self.stop)
            if low < high:
                i, j = low - self.start, high - self.start
                views = (self.weight, self.grad, self.exp_avg, self.exp_avg_sq)
                cut = [view[i:j] for view in views]
                found.append(Piece(slot, low - slot.start, high - slot.start, *cut))
        return found


class ChunkShard:
    """Owned state of one chunk, bucket by bucket; no `master` where the weight is the param."""

    def __init__(self, buffers: ChunkBuffers, num_shards: int, index: int) -> None:
        owned = buffers.numel // num_shards
        state_dtype, device = buffers.grads.dtype, buffers.grads.device
        self.exp_avg = torch.zeros(owned, dtype=state_dtype, device=device)
        self.exp_avg_sq = torch.zeros(owned, dtype=state_dtype, device=device)
        self.master: Tensor | None = None
        if buffers.params.dtype != state_dtype:
            self.master = torch.zeros(owned, dtype=state_dtype, device=device)
        self.shards: list[BucketShard] = []
        offset = 0
        for bucket in buffers.buckets:
            shard = self._shard(buffers, bucket, bucket.shard_range(num_shards, index), offset)
            self.shards.append(shard)
            offset += shard.stop - shard.start
        self.masters_from_params()

    def _shard(
        self, buffers: ChunkBuffers, bucket: Bucket, owned: tuple[int, int], offset: int
    ) -> BucketShard:
        start, stop = owned
        param = buffers.params[start:stop]
        here = slice(offset, offset + stop - start)
        weight = param if self.master is None else self.master[here]
        moments = self.exp_avg[here], self.exp_avg_sq[here]
        return BucketShard(bucket, start, stop, param, weight, buffers.grads[start:stop], *moments)

    @torch.no_grad()
    def masters_from_params(self) -> None:
        """Set every master to its parameter's value (nothing to do without masters)."""
        if self.master is not None:
            for shard in self.shards:
                shard.weight.copy_(shard.param)

    @torch.no_grad()
    def params_from_masters(self) -> None:
        """Round every master into the owned part of the parameters (nothing without masters)."""
        if self.master is not None:
            for shard in self.shards:
                shard.param.copy_(shard.weight)
