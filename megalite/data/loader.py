"""Reading the steps of a run ahead of their use, in threads; the caller decides the order.

A step's value does not depend on the number of workers: `read` is a pure function of the step. An
error in `read` is raised when its step is asked for, not before. Threads suffice, because reading a
file and copying arrays release the interpreter's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Loader(Generic[T]):
    """Context manager: `step(n)` returns read(n), which a thread may have read already.

    `workers` threads read up to `prefetch` steps ahead, below `stop`. No thread starts before the
    first step is asked for. Steps may be asked for in any order; only the step after the last one
    is read ahead. With 0 workers nothing is.
    """

    def __init__(
        self, read: Callable[[int], T], *, stop: int, workers: int = 0, prefetch: int = 1
    ) -> None:
        self._read, self._stop = read, stop
        self._workers, self._prefetch = workers, prefetch
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[int, Future[T]]] = deque()  # consecutive steps

    def step(self, step: int) -> T:
        """The value of a step; waits until it has been read."""
        if not self._workers:
            return self._read(step)
        if not self._ahead or self._ahead[0][0] != step:
            self._drop()
            self._submit(step)
        _, value = self._ahead.popleft()
        self._fill(step + 1)
        return value.result()

    def close(self) -> None:
        """End the threads, after the steps that they are reading now."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Loader[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _fill(self, first: int) -> None:
        following = self._ahead[-1][0] + 1 if self._ahead else first
        for step in range(following, min(first + self._prefetch, self._stop)):
            self._submit(step)

    def _submit(self, step: int) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="megalite-data")
        self._ahead.append((step, self._pool.submit(self._read, step)))

    def _drop(self) -> None:
        for _, value in self._ahead:
            value.cancel()
        self._ahead.clear()
