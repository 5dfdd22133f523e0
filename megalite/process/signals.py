"""Signals that ask a run to save and leave, as a flag that the ranks agree on at a step's edge.

The trainer sums the flags over all ranks with the step's loss, so a signal to any one rank makes
all of them save at the same step and leave. A process installs the flag before anything else and
passes it on to the trainer, so a signal during start-up counts, too: the first step is done and
saved. A second signal ends the process at once, without saving. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from megalite.errors import EXIT_FAULT
from megalite.process.launcher import Launch
from megalite.process.terminal import show_cursor

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

# After a signal: seconds that a rank may wait for another one that is gone, or that never joins.
# Below the 30 s after which torchrun and Slurm (KillWait) kill what they asked to leave.
LEAVE_S = 20.0

# Slurm signals every process of a step, and torchrun passes the signal that it got on to its ranks,
# so one `scancel` comes twice. The same signal within so many seconds is the same request.
_SAME_REQUEST_S = 2.0

# timeout(1) signals its child, and at once the whole group that the child is in.
_TWICE_S = 0.2

_TAKEN_S = 1.0  # for the listening thread to take a signal; it does so in milliseconds


class SignalFlag:
    """Context manager: while active, the signals in CAUGHT are remembered, not obeyed.

    The second one calls `end(128 + number)`; the same one again within a moment is none. SIGUSR1 is
    no first or second: it is Slurm's warning before a time limit, after which SIGTERM comes while
    the run may still save. SIGHUP is left alone where it is ignored, as under nohup.

    Entering it again inside changes nothing. On entry the signals are unblocked, so one that came
    while they were blocked is remembered now. `pass_on` is called with each signal that is not the
    second one. The first one prints `says`, what it will do, unless that is "". With `interrupts`
    it also raises KeyboardInterrupt in the main thread, once.
    """

    def __init__(
        self, says: str = "saves at the end of the step and leaves", *, interrupts: bool = False
    ) -> None:
        self.received: dict[int, float] = {}  # signal: monotonic seconds at which it first came
        self._says, self._interrupts = says, interrupts
        self.pass_on: Callable[[int], object] = lambda number: None
        self.end: Callable[[int], object] = leave_now
        self._same_request_s = _TWICE_S
        self._depth = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._wakeup: tuple[int, int] | None = None  # ends of the pipe of the listening thread
        self._taken = threading.Event()

    @property
    def raised(self) -> bool:
        """True if a signal came."""
        return bool(self.received)

    @property
    def name(self) -> str | None:
        """Name of the first signal that came; None if none did."""
        return signal.Signals(next(iter(self.received))).name if self.received else None

    def asked_s(self, since: float) -> float:
        """Seconds since the first signal and `since` (monotonic), the later; 0 without a signal."""
        came = min(self.received.values(), default=math.inf)
        return max(0.0, time.monotonic() - max(came, since))

    def place(self, launch: Launch) -> None:
        """Behave as a rank that was started so: rank 0 alone speaks, repetitions do not count.

        Under the local launcher only that speaks, and counts.
        """
        if launch.rank != 0 or launch.source == "local":
            self._says = ""
        same_request_s = {"local": math.inf, "single": _TWICE_S}
        self._same_request_s = same_request_s.get(launch.source, _SAME_REQUEST_S)

    def listen(self) -> None:
        """Take signals in a thread from now on, also while the main thread is blocked.

        Python's own handlers run in the main thread, and not before a call that blocks there, such
        as a collective, has returned. Call it inside the context, in the main thread; a process
        that listens should not fork.
        """
        if self._wakeup is not None:
            return
        # Blocked meanwhile, so that each signal reaches either the handler or the thread. The call
        # also runs the handlers of signals that came before.
        signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
        reader, writer = self._wakeup = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)

    @contextlib.contextmanager
    def bounds(self, waits_for: str) -> Iterator[None]:
        """Within it a process that was asked to leave does so after LEAVE_S seconds, by `end`.

        For a wait outside the trainer, in a process that listens; `waits_for` is printed.
        """
        began, done = time.monotonic(), threading.Event()

        def watch() -> None:
            while not done.wait(0.5):
                if self.asked_s(since=began) >= LEAVE_S:
                    _print(f"{self.name}: leaves after {LEAVE_S:g} s without {waits_for}")
                    self.end(EXIT_FAULT)
                    return

        threading.Thread(target=watch, name="bounds", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def __enter__(self) -> SignalFlag:
        self._depth += 1
        if self._depth == 1:
            for number in CAUGHT:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        for number, previous in self._previous.items():
            # None: a handler that Python did not install and cannot restore
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._wakeup[1])  # the thread reads the end of the pipe, and ends
            self._wakeup = None

    def ignore(self) -> None:
        """Ignore the signals from now on, also after the context.

        For a process that has its exit code: a late signal must not replace it.
        """
        for number in CAUGHT:
            signal.signal(number, signal.SIG_IGN)
        self._previous.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Python's handler: takes the signal unless the thread has it."""
        if self._wakeup is None:
            self._take(number)
        if self._interrupts:
            self._interrupts = False  # another one must not interrupt the cleanup
            # The thread prints what happens now before the main thread prints what came of it.
            self._taken.wait(_TAKEN_S)
            raise KeyboardInterrupt

    def _read(self, reader: int) -> None:
        """Body of the thread: the numbers of signals come through the pipe."""
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in CAUGHT:
                    self._take(number)
        os.close(reader)

    def _take(self, number: int) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        repeats = now - self.received.get(number, -math.inf) < self._same_request_s
        asked = any(earlier != signal.SIGUSR1 for earlier in self.received)
        if asked and number != signal.SIGUSR1 and not repeats:
            if self._says:
                _print(f"{name} again: ends at once, without saving")
            self.end(128 + number)
            return

        if self._says and not self.received:
            _print(f"{name}: {self._says}; again: ends at once")
        self.received.setdefault(number, now)
        self.pass_on(number)
        self._taken.set()


def leave_now(code: int) -> None:
    """End the process at once: no cleanup but of the terminal, whatever other threads do."""
    show_cursor()
    os._exit(code)


def _print(line: str) -> None:
    """Write a line to stderr, not through Python's file: its lock may be held by what was
    interrupted.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
