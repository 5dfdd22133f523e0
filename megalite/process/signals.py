"""SIGTERM and SIGUSR1 as flags that the ranks agree on at a step's edge.

A handler only remembers. The trainer sums the flags over all ranks with the step's loss, so that a
signal to any one rank makes all of them save at the same step and leave. The flag is put up first
thing in a process and handed on to the trainer, so that a signal during start-up counts, too: the
first step is done and saved. Knows no torch.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

# EX_TEMPFAIL of sysexits.h: the run saved its state and wants to be started again.
EXIT_SAVED_ON_SIGNAL = 75

CAUGHT = (signal.SIGTERM, signal.SIGUSR1)


class SignalFlag:
    """While active as a context, SIGTERM and SIGUSR1 are remembered and do not end the process.

    Entering it again inside is allowed and changes nothing. Signals of the two that the process
    blocked until now are let in.
    """

    def __init__(self) -> None:
        self.came: list[int] = []  # numbers, oldest first
        self._depth = 0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def raised(self) -> bool:
        return bool(self.came)

    @property
    def name(self) -> str | None:
        """Name of the first signal that came."""
        return signal.Signals(self.came[0]).name if self.came else None

    def __enter__(self) -> SignalFlag:
        self._depth += 1
        if self._depth == 1:
            for number in CAUGHT:
                self._previous[number] = signal.signal(number, self._remember)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, previous in self._previous.items():
                # None: a handler that Python did not install and cannot put back
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
            self._previous.clear()

    def ignore(self) -> None:
        """From now on the signals do nothing: the process ends with a code of its own anyway."""
        for number in CAUGHT:
            signal.signal(number, signal.SIG_IGN)
        self._previous.clear()

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.came.append(number)
