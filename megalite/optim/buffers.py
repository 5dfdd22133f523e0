"""Flat parameter and gradient buffers of one model chunk, cut into buckets.

Parameters are re-pointed into one flat buffer, their main gradients live in another one of the
same layout, so that a collective or an optimizer kernel sees a few long ranges and not thousands
of tensors. Buckets lie in reverse use order: backward fills the first bucket first. This module
only lays memory out; it communicates nothing and updates nothing. The places in the buffers come
from layout/bucket_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megalite.config import OptimizerConfig
from megalite.distributed.mesh import Axis, Mesh
from megalite.distributed.precision import main_grad_dtype
from megalite.layout.bucket_plan import BucketPlan, plan_chunk
from megalite.layout.sharding import ShardSpec
from megalite.run.rules import Rule, bucket_item, rule_of


class GradSink(Protocol):
    """The part of a chunk's gradient store that the optimizer uses."""

    listener: Callable[[nn.Parameter], None] | None

    def bind(self, param: nn.Parameter, buffer: Tensor) -> None: ...


class OptimizerChunk(Protocol):
    """The part of a model chunk that the optimizer uses: a protocol, so that it imports no model.

    The chunk calls `before_section(i)`, if set, ahead of the first use of section i in a forward.
    """

    before_section: Callable[[int], None] | None

    @property
    def grads(self) -> GradSink: ...

    def named_params(self) -> list[tuple[nn.Parameter, ShardSpec]]: ...

    def sections(self) -> list[list[nn.Parameter]]: ...


@dataclass(frozen=True)
class Slot:
    """One parameter's place [start, stop) in the flat buffers, in elements."""

    param: nn.Parameter
    spec: ShardSpec
    start: int
    stop: int
    rule: Rule


@dataclass(frozen=True)
class Bucket:
    """A contiguous range of the flat buffers that is reduced and gathered as one."""

    start: int
    stop: int
    slots: tuple[Slot, ...]
    axis: Axis  # its gradients are summed over, and its parts lie on, the ranks of this axis
    tied: bool
    whole: bool  # each rank's shard is made of whole parameters

    def shard_range(self, sharded: bool) -> tuple[int, int]:
        """This rank's part, in elements of the flat buffer: all of it unless `sharded`."""
        if not sharded:
            return self.start, self.stop
        size = (self.stop - self.start) // self.axis.size
        return self.start + self.axis.rank * size, self.start + (self.axis.rank + 1) * size


class ChunkBuffers:
    """The flat buffers of one chunk. Building one re-points the chunk's parameters into it.

    `params` and `grads` have equal length and layout; a chunk without parameters has buffers of
    length 0 and no buckets. Under ZeRO-1, parameters of Muon lie whole on the ranks of their axis.
    """

    def __init__(
        self,
        chunk: OptimizerChunk,
        dtype: torch.dtype,
        device: torch.device,
        config: OptimizerConfig,
        mesh: Mesh,
    ) -> None:
        # In reverse order of use, the order in which backward finishes gradients.
        grad_dtype = main_grad_dtype(dtype)
        named = list(reversed(chunk.named_params()))
        rules = [rule_of(spec, config) for _, spec in named]
        items = [
            bucket_item(spec, rule, mesh.topology, config.zero == 1)
            for (_, spec), rule in zip(named, rules, strict=True)
        ]
        plans = plan_chunk(items, int(config.bucket_mb * 2**20) // grad_dtype.itemsize)

        self.buckets = [_bucket(plan, named, rules, mesh) for plan in plans]
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


def _bucket(
    plan: BucketPlan,
    named: Sequence[tuple[nn.Parameter, ShardSpec]],
    rules: Sequence[Rule],
    mesh: Mesh,
) -> Bucket:
    slots = tuple(
        Slot(*named[item], start, start + named[item][0].numel(), rules[item])
        for item, start in zip(plan.items, plan.starts, strict=True)
    )
    axis = mesh.axis(slots[0].spec.grid.replica_axis)
    return Bucket(plan.start, plan.stop, slots, axis, plan.tied, plan.whole)
