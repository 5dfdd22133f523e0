"""All-gather of updated parameters, each bucket waited for at its first use in the next forward."""

from __future__ import annotations

from megalite.distributed import comm
from megalite.optim.buffers import ChunkBuffers, OptimizerChunk


class ParamGather:
    """Gathers one chunk's parameter buffer: every rank's part of every bucket, over its axis."""

    def __init__(self, chunk: OptimizerChunk, buffers: ChunkBuffers) -> None:
        self._buffers = buffers
        self._pending: dict[int, comm.Handle] = {}  # by bucket
        bucket_of = {
            id(slot.param): index
            for index, bucket in enumerate(buffers.buckets)
            for slot in bucket.slots
        }
        self._buckets_of_section = [
            sorted({bucket_of[id(param)] for param in section}, reverse=True)
            for section in chunk.sections()
        ]

    def launch(self) -> None:
        """Start all gathers in use order: the last bucket holds the parameters used first."""
        assert not self._pending, "parameters were gathered twice without a wait"
        for index in reversed(range(len(self._buffers.buckets))):
            bucket = self._buffers.buckets[index]
            params = self._buffers.params[bucket.start : bucket.stop]
            self._pending[index] = comm.start_all_gather_into(params, bucket.axis)

    def wait_section(self, section: int) -> None:
        """Wait until the parameters of one section of the chunk may be read."""
        if self._pending:
            for index in self._buckets_of_section[section]:
                self._wait_bucket(index)

    def wait(self) -> None:
        """Wait until all parameters may be read."""
        for index in list(self._pending):
            self._wait_bucket(index)

    def _wait_bucket(self, index: int) -> None:
        handle = self._pending.pop(index, None)
        if handle is not None:
            handle.wait()
