"""Chunks encoded by several processes, given back in order, with bounded memory.

At most two chunks a worker are under way, and no more than HELD_BYTES of text unless a single chunk
is larger. A worker is a plain process with pipes (encode_worker.py), started when first needed;
one worker means no process at all: this one does the work, by the same code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import IO, cast

from megalite.corpus.documents import Chunk
from megalite.corpus.encoding import Encoded, Encoder, Entry, read_message, write_message
from megalite.errors import DataError

HELD_BYTES = 64 << 20
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megalite.corpus.encode_worker import main; main()"
)


class Worker:
    """One encoding process."""

    def __init__(self, encoder: Encoder) -> None:
        command = [sys.executable, "-P", "-c", START, json.dumps(sys.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._to, self._from = cast(IO[bytes], self._process.stdin), self._process.stdout
        tokenizer, options = encoder.tokenizer, encoder.options
        header = {
            "tokenizer": str(tokenizer.path),
            "key": options.key,
            "policy": options.policy,
        }
        self._first = (header, tokenizer.content)
        self._greeted = False

    def encode(self, chunk: Chunk, check_round_trips: bool) -> Encoded:
        """As Encoder.encode; DataError when the process ended."""
        try:
            if not self._greeted:
                write_message(self._to, *self._first)
                self._greeted = True
            request = {"chunk": chunk.header(), "check": check_round_trips}
            write_message(self._to, request, chunk.payload)
            answer = read_message(cast(IO[bytes], self._from))
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise DataError(
                f"{chunk.place(0)}: an encoding process ended with exit status "
                f"{self._process.wait()} at or after this document; if the machine ran out of "
                "memory (status -9), use fewer --workers"
            )
        header, payload = answer
        size = header["ids_bytes"]
        entry = Entry.from_json(header["entry"])
        return Encoded(entry, payload[:size], payload[size:], header["failure"])

    def stop(self) -> None:
        """End the process, whatever it does, and wait for it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._to, self._from):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:  # a message that was not sent whole
                    continue


class EncodePool:
    """`encode` over chunks in order, by `num_workers` processes. A context manager."""

    def __init__(self, encoder: Encoder, num_workers: int) -> None:
        self._encoder = encoder
        self._num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers, "encode")
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._workers: list[Worker] = []

    def __enter__(self) -> EncodePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.stop()  # its thread sees the end of the pipe
        self._threads.shutdown(wait=True)

    def encode(self, chunks: Iterable[Chunk], check_first: bool) -> Iterator[tuple[Chunk, Encoded]]:
        """Each chunk and what became of it, in order; round trips of the first if asked."""
        if self._num_workers == 1:
            for chunk in chunks:
                yield chunk, self._encoder.encode(chunk, check_first)
                check_first = False
            return
        pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
        held_bytes = 0
        source = _Source(chunks)
        for chunk in source:
            while pending and (
                len(pending) >= 2 * self._num_workers
                or held_bytes + len(chunk.payload) > HELD_BYTES
            ):
                done, future = pending.popleft()
                held_bytes -= len(done.payload)
                yield done, future.result()
            self._start_one(len(pending))
            pending.append((chunk, self._threads.submit(self._run, chunk, check_first)))
            held_bytes += len(chunk.payload)
            check_first = False
        for done, future in pending:
            yield done, future.result()
        if source.failure is not None:
            raise source.failure

    def _start_one(self, num_pending: int) -> None:
        """Start a worker while there is more to do than workers."""
        if len(self._workers) < self._num_workers and num_pending >= len(self._workers):
            self._workers.append(Worker(self._encoder))
            self._idle.put(self._workers[-1])

    def _run(self, chunk: Chunk, check_round_trips: bool) -> Encoded:
        worker = self._idle.get()
        try:
            return worker.encode(chunk, check_round_trips)
        finally:
            self._idle.put(worker)


class _Source:
    """Chunks up to a file that cannot be read, whose error waits until they are done."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = chunks
        self.failure: DataError | None = None

    def __iter__(self) -> Iterator[Chunk]:
        try:
            yield from self._chunks
        except DataError as error:
            self.failure = error
