"""SIGTERM and SIGUSR1 as flags that the ranks agree on at a step's edge.

A handler only remembers the signal. The trainer sums the flags over all ranks with the step's
loss, so a signal to any one rank makes all of them save at the same step and leave. A process
installs the flag before anything else and passes it on to the trainer, so a signal during start-up
counts, too: the first step is done and saved. Imports no torch.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

CAUGHT = (signal.SIGTERM, signal.SIGUSR1)


class SignalFlag:
    """Context manager: while active, SIGTERM and SIGUSR1 are remembered, not obeyed.

    Entering it again inside changes nothing. On entry the two signals are unblocked, so one that
    came while they were blocked is remembered now.
    """

    def __init__(self) -> None:
        self.received: list[int] = []  # signal numbers, oldest first
        self._depth = 0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def raised(self) -> bool:
        """True if a signal came."""
        return bool(self.received)

    @property
    def name(self) -> str | None:
        """Name of the first signal that came; None if none did."""
        return signal.Signals(self.received[0]).name if self.received else None

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
                # None: a handler that Python did not install and cannot restore
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
            self._previous.clear()

    def ignore(self) -> None:
        """Ignore the two signals from now on, also after the context.

        For a process that has its exit code: a late signal must not replace it.
        """
        for number in CAUGHT:
            signal.signal(number, signal.SIG_IGN)
        self._previous.clear()

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
