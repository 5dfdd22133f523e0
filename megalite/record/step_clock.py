"""The time of a step on one rank, split into parts: laps of the step, and the waits inside each.

A step lasts from the end of the previous one to its own (`finish`), without a gap: every second
belongs to one lap, and inside a lap to the axis that was waited for or to the lap's own part. Times
are taken on the device: on CUDA by events on the compute stream, so a collective counts for as long
as it kept the stream from computing, and not at all where it was hidden. The events are read at the
step's end, where the exchange of the loss has synchronised the device anyway; on steps that are not
measured there are none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megalite.distributed.clock import Mark, seconds_between
from megalite.distributed.ledger import Ledger
from megalite.record.records import TIME_PARTS

# axis -> the part that waiting on it counts as. The axis of the whole world is not here: its part
# depends on the lap, see `drain`.
_PART_OF_AXIS = {
    "tp": "tp_comm",
    "dp": "dp_comm",
    "cp": "dp_comm",
    "dp_cp": "dp_comm",
    "pp": "pp_wait",
    "embedding": "pp_wait",
}


@dataclass(frozen=True)
class StepTimes:
    """The times of one rank's step: `wall_s` by the host's clock, `parts_s` by the device's.

    `parts_s` is empty where the step was not measured.
    """

    wall_s: float
    parts_s: dict[str, float]


@dataclass
class _Lap:
    part: str
    began: Mark
    ended: Mark
    waits: list[tuple[str, Mark, Mark]]  # (axis, begin, end) inside the lap


class StepClock:
    """Splits one rank's steps into `TIME_PARTS`: `begin` once, then laps and `finish` each step.

    `drain` is the part that waiting for the whole world counts as while the optimizer runs. The
    gradient norm is the first thing in a step that all ranks wait for, so with pipeline stages the
    end of the bubble appears in that wait. `measures`: True for the numbers of the steps to split.
    """

    def __init__(
        self,
        ledger: Ledger,
        drain: str = "other",
        measures: Callable[[int], bool] = lambda step: True,
    ) -> None:
        assert drain in TIME_PARTS, drain
        self._ledger, self._drain, self._measures = ledger, drain, measures
        self._laps: list[_Lap] = []
        self._step = 0
        self._began_s = 0.0
        self._mark: Mark | None = None  # the begin of the present lap; None: not measured

    def begin(self, step: int) -> None:
        """Begin the step of this number now; the time before belongs to no step."""
        self.stop()
        self._enter(step, time.perf_counter())

    def lap(self, part: str) -> None:
        """Count the time since the last lap as `part`, except for waits, which count by axis."""
        if self._mark is None:
            return
        waits = self._ledger.waits or []
        self._ledger.waits = []
        now = self._ledger.clock.mark()
        self._laps.append(_Lap(part, self._mark, now, waits))
        self._mark = now

    @contextmanager
    def phase(self, name: str, part: str) -> Iterator[None]:
        """Context whose time, waits apart, counts as `part`; the ledger's phase is `name` in it.

        Time since the last lap counts as "other".
        """
        self.lap("other")
        self._ledger.phase = name
        yield
        self.lap(part)

    def finish(self) -> StepTimes:
        """End the step now and begin the next. Call it when the device is synchronised."""
        self.lap("other")
        # one reading of the host's clock for both, so that on CPU the parts' sum is the wall time
        now_s = self._mark if isinstance(self._mark, float) else time.perf_counter()
        parts_s = dict.fromkeys(TIME_PARTS, 0.0) if self._laps else {}
        for lap in self._laps:
            self._add(lap, parts_s)
        times = StepTimes(now_s - self._began_s, parts_s)
        self._drop()
        self._enter(self._step + 1, now_s)
        return times

    def stop(self) -> None:
        """Stop measuring."""
        self._drop()
        self._recycle(self._ledger.waits or [])
        self._ledger.waits = None
        if self._mark is not None:
            self._ledger.clock.recycle([self._mark])
            self._mark = None

    def _enter(self, step: int, now_s: float) -> None:
        """Be in a step from now on, with marks if it is one to measure."""
        self._step, self._began_s = step, now_s
        if not self._measures(step):
            self.stop()
        elif self._mark is None:
            self._ledger.waits = []
            self._mark = self._ledger.clock.mark(now_s)

    def _add(self, lap: _Lap, parts_s: dict[str, float]) -> None:
        left_s = seconds_between(lap.began, lap.ended)
        for axis, first, last in lap.waits:
            waited_s = seconds_between(first, last)
            parts_s[self._part(lap.part, axis)] += waited_s
            left_s -= waited_s
        parts_s[lap.part] += left_s

    def _part(self, lap: str, axis: str) -> str:
        drain = self._drain if lap == "optimizer" else "other"
        return _PART_OF_AXIS.get(axis, drain)

    def _drop(self) -> None:
        """Forget the laps and recycle their marks, except the one at which the next lap begins."""
        for lap in self._laps:
            self._ledger.clock.recycle([lap.began])
            self._recycle(lap.waits)
        self._laps = []

    def _recycle(self, waits: list[tuple[str, Mark, Mark]]) -> None:
        for _, first, last in waits:
            self._ledger.clock.recycle([first, last])


def drain_part(pp: int, dp: int) -> str:
    """The part that waiting for the whole world's norm counts as, by the sizes of the axes.

    It is that of the first axis larger than 1, in the order pp, dp, tp, whose ranks may arrive at
    different times.
    """
    if pp > 1:
        return "pp_wait"
    return "dp_comm" if dp > 1 else "tp_comm"
