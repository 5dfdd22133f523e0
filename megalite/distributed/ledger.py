"""The record of this rank's operations between ranks: bytes sent, and how long it waited.

Counts and byte sums since the last `reset` (a step), and the last operation started, so that the
message of an error or a timeout can name this rank's operation. `seconds` is the host's clock: on
CUDA, waiting for a collective only orders streams, so seconds there are launch time, not transfer
time. While `waits` is a list, each wait is also marked on the device's own clock (`clock.py`): on
CUDA two events on the current stream, a few microseconds of host time, and no synchronisation. The
start of an operation, for which no stream waits, has no mark there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megalite.distributed.clock import Clock, Mark


class Ledger:
    """Traffic of one rank per (operation, axis), and its place in the step.

    `phase` ("forward", "backward", "optimizer", ...) and `step` are set by the caller and appear in
    errors. `waits` is None, or a list that gets (axis, mark before, mark after) of every wait.
    """

    def __init__(self, place: str, clock: Clock | None = None) -> None:
        self.place = place
        self.clock = clock or Clock(torch.device("cpu"))
        self.waits: list[tuple[str, Mark, Mark]] | None = None
        self.phase = "set-up"
        self.step: int | None = None  # the current step, from 1
        self.num_ops = 0  # since the start of the process; never reset, so ranks can be compared
        self.last_op: str | None = None
        self.broken_by: Exception | None = None  # the last error that was raised by a wait
        self.counts: dict[tuple[str, str], int] = defaultdict(int)
        self.bytes_sent: dict[tuple[str, str], float] = defaultdict(float)
        self.seconds: dict[str, float] = defaultdict(float)

    def start(self, op: str, axis: str, num_bytes: float) -> None:
        """Count operation `op` on `axis`, by which this rank sends `num_bytes`."""
        self.num_ops += 1
        self.last_op = f"{op} on {axis}, op #{self.num_ops}, {self._moment()}"
        self.counts[op, axis] += 1
        self.bytes_sent[op, axis] += num_bytes

    @contextmanager
    def blocked(
        self, axis: str, waiting_for: str | None = None, *, starting: bool = False
    ) -> Iterator[None]:
        """Time the host's wait on `axis`; an error that passes gets this rank's place as a note.

        `waiting_for` names the operation when it is not the last one started. `starting`: an
        operation starts, and nothing waits for its end.
        """
        began = time.perf_counter()
        unmarked = self.waits is None or (starting and self.clock.of_stream)
        mark = None if unmarked else self.clock.mark()
        try:
            yield
        except Exception as error:
            self.broken_by = error
            error.add_note(self.describe(waiting_for))
            raise
        finally:
            self.seconds[axis] += time.perf_counter() - began
            if self.waits is not None and mark is not None:
                self.waits.append((axis, mark, self.clock.mark()))

    def describe(self, operation: str | None = None) -> str:
        """This rank and its last operation, e.g.
        `rank 3 (tp 1, pp 1): waiting in all_reduce on tp, op #128, phase 'backward'`.
        """
        where = operation or self.last_op
        if where is None:
            return f"{self.place}: no operation between ranks yet, {self._moment()}"
        return f"{self.place}: waiting in {where}"

    def _moment(self) -> str:
        step = "" if self.step is None else f"step {self.step}, "
        return f"{step}phase {self.phase!r}"

    def reset(self) -> None:
        """Forget the totals (once a step); the operation number and the place stay."""
        self.counts.clear()
        self.bytes_sent.clear()
        self.seconds.clear()
