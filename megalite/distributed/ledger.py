"""The record of this rank's operations between ranks: bytes sent, and how long it waited.

Counts and byte sums since the last `reset` (a step), and the operation that this rank waits in, so
that the message of an error or a timeout can name it. On CUDA the host is ahead of the device, so
operations are followed to their end on the device; the oldest that has not ended is the one that
the rank waits in.

While `waits` is a list, each wait is marked on the device's own clock (`clock.py`): on CUDA
two events on the current stream, a few microseconds of host time, and no synchronisation. The start
of an operation, for which no stream waits, has no mark there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from megalite.distributed.clock import Clock, Mark

# Most unfinished operations kept for one axis or channel. CUDA itself stops a host that is some
# thousand launches ahead. Beyond it the oldest stay, of which the device is at the first.
_MAX_UNFINISHED = 1024

Channel = tuple[int, int]  # the world ranks that send and receive


class Op:
    """An operation between ranks that this rank has started; as a string, its name and place."""

    __slots__ = ("axis", "channel", "name", "number", "ordinal", "phase", "step")

    def __init__(
        self, name: str, axis: str, channel: Channel | None, number: int, ordinal: int,
        step: int | None, phase: str,
    ) -> None:  # fmt: skip
        self.name, self.axis = name, axis
        self.channel = channel  # of a message; None: all ranks of the axis take part
        self.number = number  # among all operations of this rank, from 1
        self.ordinal = ordinal  # among those of its axis or channel, the same on all its ranks
        self.step, self.phase = step, phase

    @property
    def lane(self) -> str:
        """The axis or channel in words: what goes over it keeps its order."""
        return lane_name(self.axis, self.channel)

    def __str__(self) -> str:
        moment = _moment(self.step, self.phase)
        return f"{self.name} on {self.axis}, op #{self.number}, {moment}"


class _Lane:
    """The operations of this rank on one axis or channel, which end in the order of their start."""

    __slots__ = ("num_ops", "unfinished")

    def __init__(self) -> None:
        self.num_ops = 0
        self.unfinished: deque[tuple[Op, Callable[[], bool]]] = deque()

    def current(self) -> Op | None:
        """The oldest operation that is not finished. For any thread."""
        return next((op for op, done in tuple(self.unfinished) if not done()), None)


class _Blocked:
    """The block of `Ledger.blocked`. A class, since a generator takes seven calls more."""

    __slots__ = ("axis", "ledger", "mark", "starting", "waiting_for")

    def __init__(self, ledger: Ledger, axis: str, waiting_for: Op | None, starting: bool) -> None:
        self.ledger, self.axis = ledger, axis
        self.waiting_for, self.starting = waiting_for, starting

    def __enter__(self) -> None:
        ledger = self.ledger
        unmarked = ledger.waits is None or (self.starting and ledger.clock.of_stream)
        self.mark = None if unmarked else ledger.clock.mark()
        ledger._blocked_in = self.waiting_for or ledger.last_op

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ledger = self.ledger
        if error is not None and isinstance(error, Exception):  # an exit is seldom an error's
            ledger.broken_by = error
            error.add_note(ledger.describe())
        ledger._blocked_in = None
        if ledger.waits is not None and self.mark is not None:
            ledger.waits.append((self.axis, self.mark, ledger.clock.mark()))


class OpProgress(NamedTuple):
    """The progress of a rank."""

    num_done: int  # operations between ranks that are finished, or not followed
    waits_in: Op | None  # the one that it waits in
    reached: dict[str, int]  # by lane: the last operation that is finished, or that it waits in


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
        self.last_op: Op | None = None
        self.groups: dict[str, tuple[int, ...]] = {}  # world ranks by axis, which the mesh fills in
        self._lanes: dict[tuple[str, Channel | None], _Lane] = defaultdict(_Lane)
        self._blocked_in: Op | None = None  # the operation that the host waits for
        self.broken_by: Exception | None = None  # the last error that was raised by a wait
        self.counts: dict[tuple[str, str], int] = defaultdict(int)
        self.bytes_sent: dict[tuple[str, str], float] = defaultdict(float)

    def start(self, name: str, axis: str, num_bytes: float, channel: Channel | None = None) -> Op:
        """Count operation `name` on `axis`, by which this rank sends `num_bytes`."""
        lane = self._lanes[axis, channel]
        self.num_ops += 1
        lane.num_ops += 1
        op = Op(name, axis, channel, self.num_ops, lane.num_ops, self.step, self.phase)
        self.last_op = op
        self.counts[name, axis] += 1
        self.bytes_sent[name, axis] += num_bytes
        return op

    def follow(self, op: Op, done: Callable[[], bool]) -> None:
        """Keep `op` until `done()`, which may be asked from any thread and must hold no tensor."""
        unfinished = self._lanes[op.axis, op.channel].unfinished
        while unfinished and unfinished[0][1]():
            unfinished.popleft()
        if len(unfinished) < _MAX_UNFINISHED:
            unfinished.append((op, done))

    def blocked(
        self, axis: str, waiting_for: Op | None = None, *, starting: bool = False
    ) -> _Blocked:
        """A wait on `axis`, marked if waits are; an error that passes gets this rank's place as a
        note.

        `waiting_for` is the operation when it is not the last one started. `starting`: an
        operation starts, and nothing waits for its end.
        """
        return _Blocked(self, axis, waiting_for, starting)

    def progress(self) -> OpProgress:
        """The progress of this rank, on CUDA of its device. For any thread."""
        # The oldest of all has nothing before it on this rank, so it waits for other ranks (or for
        # a kernel); the first of another axis may stand behind it and has not been reached.
        lanes = list(self._lanes.copy().items())
        firsts = [lane.current() for _, lane in lanes]
        oldest = min((op for op in firsts if op is not None), key=_number, default=None)
        reached: dict[str, int] = {}
        num_done = 0
        for ((axis, channel), lane), first in zip(lanes, firsts, strict=True):
            done = lane.num_ops if first is None else first.ordinal - 1
            num_done += done
            reached[lane_name(axis, channel)] = done + (first is not None and first is oldest)
        return OpProgress(num_done, oldest or self._blocked_in, reached)

    def describe(self) -> str:
        """This rank and the operation that it waits in, e.g.
        `rank 3 (tp 1, pp 1): waiting in all_reduce on tp, op #128, phase 'backward'`.

        In no operation it is "past" its last one.
        """
        waits_in = self.progress().waits_in
        if waits_in is not None:
            return f"{self.place}: waiting in {waits_in}"
        if self.last_op is None:
            moment = _moment(self.step, self.phase)
            return f"{self.place}: no operation between ranks yet, {moment}"
        return f"{self.place}: past {self.last_op}"

    def reset(self) -> None:
        """Forget the totals (once a step); the operation number and the place stay."""
        self.counts.clear()
        self.bytes_sent.clear()


def lane_name(axis: str, channel: Channel | None) -> str:
    """The words for an axis, or for one channel on it."""
    return axis if channel is None else f"{axis} {channel[0]}->{channel[1]}"


def _number(op: Op) -> int:
    return op.number


def _moment(step: int | None, phase: str) -> str:
    return f"phase {phase!r}" if step is None else f"step {step}, phase {phase!r}"
