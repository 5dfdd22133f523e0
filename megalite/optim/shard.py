"""This rank's part of a chunk's optimizer state, as views of a few large tensors.

Of every bucket a rank owns one of equal parts (all of it with ZeRO off). For 16-bit
parameters the part has an fp32 master; for fp32 and fp64 the weight *is* the parameter's own
memory, so no number is stored twice. Further state exists for the owned part only, by kind:
AdamW's moments, Muon's momentum, the average of the weights. No communication here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.distributed.precision import DTYPES
from megalite.kernels.adamw_operations import AdamWRun
from megalite.layout.sharding import ShardSpec
from megalite.optim.buffers import Bucket, ChunkBuffers, Slot

T = TypeVar("T")

ADAMW_KINDS = ("exp_avg", "exp_avg_sq")
MUON_KINDS = ("momentum",)
EMA = "ema"


@dataclass(frozen=True)
class Piece:
    """The owned part of one parameter: [start, stop) of its flat, row-major, tp-local values.

    `states`: 1-D views by kind, as long as `weight`.
    """

    slot: Slot
    start: int
    stop: int
    weight: Tensor
    grad: Tensor
    states: dict[str, Tensor]

    @property
    def spec(self) -> ShardSpec:
        return self.slot.spec


@dataclass(frozen=True)
class BucketShard:
    """The owned part of one bucket: elements [start, stop) of the flat buffers, all 1-D views.

    `param` is in the parameter type; `weight` is the master (16-bit) or the very same memory.
    """

    bucket: Bucket
    start: int
    stop: int
    param: Tensor
    weight: Tensor
    grad: Tensor
    states: dict[str, Tensor]

    def runs(self) -> list[AdamWRun]:
        """The fewest contiguous ranges for AdamW to update, each with one rule.

        Frozen parameters (`requires_grad` off) are in none: decay would move them, too.
        """
        if self.bucket.whole:
            return []
        m, v = (self.states[kind] for kind in ADAMW_KINDS)
        low = self.param if self.weight is not self.param else None
        return [
            AdamWRun(
                self.weight[i:j],
                self.grad[i:j],
                m[i:j],
                v[i:j],
                None if low is None else low[i:j],
                rule.lr_scale,
                rule.weight_decay,
            )
            for i, j, (trained, rule) in self.split(
                lambda slot: (slot.param.requires_grad, slot.rule)
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
                states = {kind: state[i:j] for kind, state in self.states.items()}
                weight, grad = self.weight[i:j], self.grad[i:j]
                found.append(Piece(slot, low - slot.start, high - slot.start, weight, grad, states))
        return found


class ChunkShard:
    """Owned state of one chunk, bucket by bucket; no `master` where the weight is the param.

    `states`: all of the chunk's state of a kind, as one tensor.
    """

    def __init__(self, buffers: ChunkBuffers, config: OptimizerConfig) -> None:
        wide = buffers.grads.dtype
        # "float32" stands for the main gradients' type, which is float64 for float64 parameters.
        moments = wide if config.moment_dtype == "float32" else DTYPES[config.moment_dtype]
        ranges = [bucket.shard_range(config.zero == 1) for bucket in buffers.buckets]
        kinds = [kinds_of(bucket, config) for bucket in buffers.buckets]
        numels = [stop - start for start, stop in ranges]
        device = buffers.grads.device

        # One tensor for each kind of state of all buckets, and one for the masters.
        self.states: dict[str, Tensor] = {}
        cuts: dict[str, Sequence[Tensor]] = {}
        for kind in (*ADAMW_KINDS, *MUON_KINDS, EMA):
            parts = [n if kind in has else 0 for n, has in zip(numels, kinds, strict=True)]
            if any(parts):
                dtype = wide if kind == EMA else moments
                self.states[kind] = torch.zeros(sum(parts), dtype=dtype, device=device)
                cuts[kind] = torch.split(self.states[kind], parts)
        self.master: Tensor | None = None
        params = [buffers.params[start:stop] for start, stop in ranges]
        weights: Sequence[Tensor] = params
        if buffers.params.dtype != wide:
            self.master = torch.zeros(sum(numels), dtype=wide, device=device)
            weights = torch.split(self.master, numels)

        # Each bucket has a part of every tensor of its kinds, in the order of the buckets.
        self.shards: list[BucketShard] = []
        for i, (bucket, (start, stop)) in enumerate(zip(buffers.buckets, ranges, strict=True)):
            states = {kind: cuts[kind][i] for kind in kinds[i]}
            param, grad = params[i], buffers.grads[start:stop]
            self.shards.append(BucketShard(bucket, start, stop, param, weights[i], grad, states))
            if self.master is not None:
                weights[i].copy_(param)
        self.reset_averages()

    @torch.no_grad()
    def reset_averages(self) -> None:
        """Set averages to the weights."""
        for shard in self.shards:
            if EMA in shard.states:
                shard.states[EMA].copy_(shard.weight)

    @torch.no_grad()
    def params_from_masters(self, whole_only: bool = False) -> None:
        """Round every master into the owned part of the parameters (nothing without masters).

        whole_only: those of buckets of whole parameters alone; the others are up to date.
        """
        if self.master is not None:
            for shard in self.shards:
                if shard.bucket.whole or not whole_only:
                    shard.param.copy_(shard.weight)


def kinds_of(bucket: Bucket, config: OptimizerConfig) -> tuple[str, ...]:
    """The kinds of state that a bucket's parameters have."""
    kinds = MUON_KINDS if bucket.whole else ADAMW_KINDS
    return kinds if config.ema_decay is None else (*kinds, EMA)
