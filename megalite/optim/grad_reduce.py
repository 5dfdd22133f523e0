"""Data-parallel reduction of one chunk's gradients, bucket by bucket, overlapped with backward.

A bucket's reduction starts when its last contribution of the step is in and every earlier bucket
of the chunk has started: launches are in bucket order on every rank, whatever order gradients
come in. The operation is a sum (the loss is divided by the step's token count already).
Independent of tp, tied weights, norms and optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megalite.config import OptimizerConfig
from megalite.distributed import comm
from megalite.distributed.mesh import Axis
from megalite.distributed.precision import DTYPES
from megalite.distributed.reduced_precision import all_reduce_rounded, reduce_scatter_rounded
from megalite.layout.bucket_plan import ROUNDED_IN_FLIGHT
from megalite.optim.buffers import ChunkBuffers, OptimizerChunk


class GradReducer:
    """Reduces a chunk's gradient buffer, each bucket over its axis, in place.

    ZeRO-1 reduce-scatters, after which a rank's own part of each bucket is valid and the rest
    undefined; ZeRO-0 all-reduces. Without `overlap_grad_reduce` everything starts in `wait`, with
    the same numbers. Gradients are rounded for sending if `grad_reduce_dtype` is narrower: copies
    of at most `ROUNDED_IN_FLIGHT` buckets are then alive at a time.
    """

    def __init__(
        self, chunk: OptimizerChunk, buffers: ChunkBuffers, config: OptimizerConfig
    ) -> None:
        self._chunk, self._buffers, self._config = chunk, buffers, config
        self._bucket_of = {
            id(slot.param): index
            for index, bucket in enumerate(buffers.buckets)
            for slot in bucket.slots
        }
        self._awaited: dict[int, int] = {}  # contributions to come, by parameter
        self._num_awaited: list[int] = []  # by bucket: parameters with contributions to come
        self._rounded = config.grad_reduce_dtype != "float32"  # the gradients' own type
        self._reductions: list[Iterator[None]] = []  # in flight, by bucket; each `next` is a step

    @torch.no_grad()
    def begin(self) -> None:
        """Zero the gradients for a new step."""
        assert not self._reductions, "a step began while gradient reductions were in flight"
        self._buffers.grads.zero_()

    def expect_last(self) -> None:
        """Contributions from now on, `spec.contributions` a parameter, are the step's last."""
        if not self._config.overlap_grad_reduce:
            return
        buckets = self._buffers.buckets
        trained = [[s for s in b.slots if s.param.requires_grad] for b in buckets]
        self._awaited = {id(s.param): s.spec.contributions for slots in trained for s in slots}
        self._num_awaited = [len(slots) for slots in trained]
        self._chunk.grads.listener = self._contributed

    def finish(self) -> None:
        """The chunk's last backward is done: start what has not started, in bucket order."""
        self._chunk.grads.listener = None
        if self._config.overlap_grad_reduce:
            self._launch_all()

    def wait(self) -> None:
        """Start what is left and wait for all; afterwards the reduced gradients may be read."""
        self._chunk.grads.listener = None
        self._launch_all()
        for reduction in self._reductions:
            for _ in reduction:
                pass
        self._reductions = []

    def _contributed(self, param: nn.Parameter) -> None:
        key = id(param)
        self._awaited[key] -= 1
        assert self._awaited[key] >= 0, "a gradient came in after its last expected contribution"
        if self._awaited[key] > 0:
            return
        self._num_awaited[self._bucket_of[key]] -= 1
        for num_awaited in self._num_awaited[len(self._reductions) :]:
            if num_awaited:
                break
            self._launch_next()

    def _launch_all(self) -> None:
        while len(self._reductions) < len(self._buffers.buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buffers.buckets[len(self._reductions)]
        grads = self._buffers.grads[bucket.start : bucket.stop]
        # The copies of an earlier bucket are given back before this one makes its own. Which bucket
        # it is depends on the order alone, so that all ranks start their collectives in one order.
        if self._rounded:
            for steps_behind in (ROUNDED_IN_FLIGHT, 2 * ROUNDED_IN_FLIGHT):
                if len(self._reductions) >= steps_behind:
                    next(self._reductions[-steps_behind], None)
        self._reductions.append(self._reduction(grads, bucket.axis))
        next(self._reductions[-1], None)

    def _reduction(self, grads: Tensor, axis: Axis) -> Iterator[None]:
        """The steps of a bucket's reduction: the first starts it, the last leaves the result."""
        scatter = self._config.zero == 1
        if self._rounded:
            reduce = reduce_scatter_rounded if scatter else all_reduce_rounded
            yield from reduce(grads, axis, DTYPES[self._config.grad_reduce_dtype])
            return
        start = comm.start_reduce_scatter_into if scatter else comm.start_all_reduce
        handle = start(grads, axis)
        yield
        handle.wait()
