"""Where the time of a step goes on one rank: laps of the step, and the waits inside each.

A step is measured from one step's end to the next (`finish`), without a gap: every second belongs
to one lap, and inside a lap to the axis that was waited for or to the lap's own part. All marks are
the device's: on CUDA events on the compute stream, so a collective counts for as long as it kept
the stream from computing, and is free where it was hidden. They are read once a step, at its end,
where agreeing on the loss has synchronised the device anyway.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from megalite.distributed.clock import Mark, seconds_between
from megalite.distributed.ledger import Ledger
from megalite.record.records import TIME_PARTS

# Which part waiting on an axis belongs to. The world waits for its slowest rank: see `drain`.
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
    """One rank's step: seconds by the host's clock, and the device's seconds in each part."""

    wall_s: float
    parts_s: dict[str, float]


@dataclass
class _Lap:
    part: str
    began: Mark
    ended: Mark
    waits: list[tuple[str, Mark, Mark]]


class StepClock:
    """Splits one rank's steps into `TIME_PARTS`. `begin`, then laps, then `finish`, over and over.

    `drain` is the part that waiting for the whole world is counted as while the optimizer runs: the
    norm is the first thing for which a rank waits for all others, so with pipeline stages it is
    there that the end of the bubble shows.
    """

    def __init__(self, ledger: Ledger, drain: str = "other") -> None:
        assert drain in TIME_PARTS, drain
        self._ledger, self._drain = ledger, drain
        self._laps: list[_Lap] = []
        self._began_s = 0.0
        self._mark: Mark = 0.0

    def begin(self) -> None:
        """Start measuring here: what lies before belongs to no step."""
        self.stop()
        self._ledger.waits = []
        self._began_s = time.perf_counter()
        self._mark = self._ledger.clock.mark()

    def lap(self, part: str) -> None:
        """What happened since the last lap, waits apart, was `part`."""
        waits = self._ledger.waits or []
        self._ledger.waits = []
        now = self._ledger.clock.mark()
        self._laps.append(_Lap(part, self._mark, now, waits))
        self._mark = now

    def finish(self) -> StepTimes:
        """End the step now and begin the next. Call it with the device synchronised."""
        self.lap("other")
        now_s = time.perf_counter()
        parts_s = dict.fromkeys(TIME_PARTS, 0.0)
        for lap in self._laps:
            self._add(lap, parts_s)
        times = StepTimes(now_s - self._began_s, parts_s)
        self._began_s = now_s
        self._drop()
        return times

    def stop(self) -> None:
        """Measure no more."""
        self._drop()
        self._recycle(self._ledger.waits or [])
        self._ledger.waits = None

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
        """Forget the laps; their marks are used again, but for the one the next lap begins at."""
        for lap in self._laps:
            self._ledger.clock.recycle([lap.began])
            self._recycle(lap.waits)
        self._laps = []

    def _recycle(self, waits: list[tuple[str, Mark, Mark]]) -> None:
        for _, first, last in waits:
            self._ledger.clock.recycle([first, last])


def drain_part(pp: int, dp: int) -> str:
    """What waiting for the whole world's norm means in a layout: the next axis that is uneven."""
    return "pp_wait" if pp > 1 else "dp_comm" if dp > 1 else "tp_comm"
