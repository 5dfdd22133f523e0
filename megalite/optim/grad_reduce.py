"""Data-parallel reduction of one chunk's gradients, bucket by bucket, overlapped with backward.

A bucket's reduction starts when its last contribution of the step is in and every earlier bucket
of the chunk has started: launches are in bucket order on every rank, whatever order gradients
come in. The operation is a sum (the loss is divided by the step's token count already).
Independent of tp, tied weights, norms and optimizer state.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from megalite.config import OptimizerConfig
from megalite.distributed import comm
from megalite.distributed.mesh import Axis
from megalite.distributed.precision import DTYPES
from megalite.distributed.reduced_precision import RoundedAllReduce, reduce_scatter_rounded
from megalite.optim.buffers import ChunkBuffers, OptimizerChunk


class Waitable(Protocol):
    """A collective in flight; `wait` makes its result usable on this rank."""

    def wait(self) -> object: ...


class GradReducer:
    """Reduces a chunk's gradient buffer, each bucket over its axis, in place.

    ZeRO-1 reduce-scatters, after which a rank's own part of each bucket is valid and the rest
    undefined; ZeRO-0 all-reduces. Without `overlap_grad_reduce` everything starts in `wait`, with
    the same numbers. Gradients are rounded for sending if `grad_reduce_dtype` is narrower.
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
        self._handles: list[Waitable] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Zero the gradients for a new step."""
        assert not self._handles, "a step began while gradient reductions were in flight"
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
        for handle in self._handles:
            handle.wait()
        self._handles = []

    def _contributed(self, param: nn.Parameter) -> None:
        key = id(param)
        self._awaited[key] -= 1
        assert self._awaited[key] >= 0, "a gradient came in after its last expected contribution"
        if self._awaited[key] > 0:
            return
        self._num_awaited[self._bucket_of[key]] -= 1
        for num_awaited in self._num_awaited[len(self._handles) :]:
            if num_awaited:
                break
            self._launch_next()

    def _launch_all(self) -> None:
        while len(self._handles) < len(self._buffers.buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buffers.buckets[len(self._handles)]
        grads = self._buffers.grads[bucket.start : bucket.stop]
        self._handles.append(self._reduce(grads, bucket.axis))

    def _reduce(self, grads: Tensor, axis: Axis) -> Waitable:
        scatter, name = self._config.zero == 1, self._config.grad_reduce_dtype
        if name != "float32":  # which stands for the gradients' own type
            reduce = reduce_scatter_rounded if scatter else RoundedAllReduce
            return reduce(grads, axis, DTYPES[name])
        if scatter:
            return comm.start_reduce_scatter_into(grads, axis)
        return comm.start_all_reduce(grads, axis)
