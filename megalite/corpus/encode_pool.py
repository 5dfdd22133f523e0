"""Encoding chunks in several processes, with results in order and bounded memory.

At most two chunks per worker are in memory, and no more than HELD_BYTES of text unless a single
chunk is larger; encoding takes up to ENCODING_FACTOR (documents.py) times as much. A worker is a
plain process with pipes (encode_worker.py), started when first needed. With one worker no process
is started: this one encodes, by the same code.
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

from megalite.corpus.documents import CorpusChunk
from megalite.corpus.encoding import Encoded, Encoder, Entry, read_message, write_message
from megalite.errors import DataError

HELD_BYTES = 64 << 20  # text of the chunks in memory, over all workers
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megalite.corpus.encode_worker import main; main()"
)


class Worker:
    """One encoding process, used by one thread at a time."""

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
        self._set_up = (header, tokenizer.content)  # the first message
        self._is_set_up = False

    def encode(self, chunk: CorpusChunk, check_round_trips: bool) -> Encoded:
        """The result of Encoder.encode; raises DataError if the process has ended."""
        try:
            if not self._is_set_up:
                write_message(self._to, *self._set_up)
                self._is_set_up = True
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
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()
        for stream in (self._to, self._from):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:  # a part of a message was still buffered
                    continue


class EncodePool:
    """Context manager: encodes chunks in `num_workers` processes."""

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
            worker.stop()  # a thread that waits for its answer sees the end of the pipe, and ends
        self._threads.shutdown(wait=True)

    def encode(
        self, chunks: Iterable[CorpusChunk], check_first: bool
    ) -> Iterator[tuple[CorpusChunk, Encoded]]:
        """Each chunk and its result, in order; with `check_first`, round trips of the first chunk.

        An error in reading `chunks` is raised after the results of those before it.
        """
        if self._num_workers == 1:
            for chunk in chunks:
                yield chunk, self._encoder.encode(chunk, check_first)
                check_first = False
            return

        pending: deque[tuple[CorpusChunk, Future[Encoded]]] = deque()
        held_bytes = 0
        source = _Source(chunks)
        for chunk in source:
            # Results are taken in order, and before the next chunk is added: so memory is bounded
            # also while the first of them takes longest.
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
        """Start another worker if all of them have a chunk to encode."""
        if len(self._workers) < self._num_workers and num_pending >= len(self._workers):
            self._workers.append(Worker(self._encoder))
            self._idle.put(self._workers[-1])

    def _run(self, chunk: CorpusChunk, check_round_trips: bool) -> Encoded:
        worker = self._idle.get()
        try:
            return worker.encode(chunk, check_round_trips)
        finally:
            self._idle.put(worker)


class _Source:
    """Chunks up to a file that cannot be read; keeps its error, for after they are encoded."""

    def __init__(self, chunks: Iterable[CorpusChunk]) -> None:
        self._chunks = chunks
        self.failure: DataError | None = None

    def __iter__(self) -> Iterator[CorpusChunk]:
        try:
            yield from self._chunks
        except DataError as error:
            self.failure = error
