"""SIGTERM and SIGUSR1 as flags that the ranks agree on at a step's edge.

A handler only remembers. The trainer sums the flags over all ranks with the step's loss, so that a
signal to any one rank makes all of them save at the same step and leave.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# EX_TEMPFAIL of sysexits.h: the run saved its state and wants to be started again.
EXIT_SAVED_ON_SIGNAL = 75


class SignalFlag:
    """While active as a context, SIGTERM and SIGUSR1 set `name` and do not end the process."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def raised(self) -> bool:
        return self.name is not None

    def __enter__(self) -> SignalFlag:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._handler())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            # None: a handler that Python did not install and cannot put back
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _handler(self) -> Callable[[int, FrameType | None], None]:
        def remember(number: int, _frame: FrameType | None) -> None:
            self.name = signal.Signals(number).name

        return remember
