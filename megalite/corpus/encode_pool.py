"""Encoding chunks in several processes, with results in order and bounded memory.

At most two chunks per worker are in memory, and no more than HELD_BYTES of text unless a single
chunk is larger; encoding takes up to ENCODING_FACTOR (documents.py) times as much. A worker is a
plain process with pipes, started when first needed; it ends when its input does, so it never
outlives the run that started it, however that ended. With one worker no process is started: this
one encodes, by the same code.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, Any, cast

from megalite.corpus.documents import CorpusChunk
from megalite.corpus.encoding import Encoded, Encoder
from megalite.data.tokenizer import tokenizer_of
from megalite.errors import DataError
from megalite.process.signals import CAUGHT

HELD_BYTES = 64 << 20  # text of the chunks in memory, over all workers
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megalite.corpus.encode_pool import main; main()"
)


class Worker:
    """One encoding process, used by one thread at a time."""

    def __init__(self, encoder: Encoder) -> None:
        command = [sys.executable, "-P", "-c", START, json.dumps(sys.path)]
        # In a process group of its own the keys and the end of a terminal reach the parent alone.
        # Slurm signals every process: blocked from its first moment, the worker leaves it to the
        # parent to end it, whose message would otherwise be that a worker has died.
        kept = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, kept)
        self._to = cast(IO[bytes], self._process.stdin)
        self._from = cast(IO[bytes], self._process.stdout)
        set_up = (encoder.tokenizer.files, encoder.form, encoder.policy)
        self._unsent: tuple[Any, ...] = (set_up,)

    def encode(self, chunk: CorpusChunk, check_round_trips: bool) -> Encoded:
        """The result of Encoder.encode; raises DataError if the process has ended."""
        try:
            for message in (*self._unsent, (chunk, check_round_trips)):
                pickle.dump(message, self._to)
            self._to.flush()
            self._unsent = ()
            return cast(Encoded, pickle.load(self._from))
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            raise DataError(
                f"{chunk.place(0)}: an encoding process ended with exit status "
                f"{self._process.wait()} at or after this document; if the machine ran out of "
                "memory (status -9), use fewer --workers"
            ) from None

    def stop(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()
        for stream in (self._to, self._from):
            with suppress(BrokenPipeError):  # a part of a message was still buffered
                stream.close()


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

    def __exit__(self, *error: object) -> None:
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
        failures: list[DataError] = []
        for chunk in _until_failure(chunks, failures):
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
        for failure in failures:
            raise failure

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


def _until_failure(
    chunks: Iterable[CorpusChunk], failures: list[DataError]
) -> Iterator[CorpusChunk]:
    """Chunks up to a file that cannot be read; its error is kept, for after they are encoded."""
    try:
        yield from chunks
    except DataError as error:
        failures.append(error)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer a `Worker` until its requests end: first what makes an encoder, then chunks."""
    with suppress(EOFError, pickle.UnpicklingError):
        files, form, policy = pickle.load(requests)
        encoder = Encoder(tokenizer_of(files), form, policy)
        while True:
            pickle.dump(encoder.encode(*pickle.load(requests)), answers)
            answers.flush()


def main() -> None:
    """Entry point of the process."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # From here on a print, of a library for example, goes to stderr and not between the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:  # the parent is gone
        sys.stderr = None  # no message at exit about answers that could not be flushed
        raise SystemExit(1) from None
