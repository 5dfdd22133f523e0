"""Start all ranks of a world on this host, and look after them until they end.

For `megalite train --local` and for laptops; clusters use torchrun or srun. It does not
restart ranks.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from megalite.errors import ConfigError, MegaliteError
from megalite.process.env import DeviceKind, hold_port, init_process, pick_device
from megalite.process.failures import retell
from megalite.process.launcher import Launch

StartMethod = Literal["fork", "spawn"]

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

# After one rank failed, how long the others may take to notice by themselves.
_GRACE_S = 1.0

# Exit code of a rank that raised an error the user can fix; any other exception gives 1.
_CONFIG_EXIT = 2


@dataclass
class _Failure:
    """What a rank said when it raised: `when` is the host's monotonic clock, in seconds."""

    when: float
    text: str  # a traceback, or "error:" lines when the error is the user's to fix
    summary: str
    exit_code: int
    of_peer: bool = False  # it only says that another rank failed


@dataclass
class _Rank:
    rank: int
    process: BaseProcess
    reports: Connection
    failure: _Failure | None = None
    ended_at: float | None = None  # when it was seen to be gone, monotonic seconds
    ended_by_us: bool = False

    def read(self) -> None:
        """Take the rank's report, if it left one."""
        with contextlib.suppress(EOFError, OSError):
            if not self.reports.closed and self.reports.poll():
                self.failure = self.reports.recv()

    @property
    def alive(self) -> bool:
        return self.process.exitcode is None

    @property
    def failed(self) -> bool:
        """Raised, or was killed by a signal that did not come from here."""
        return self.failure is not None or ((self.process.exitcode or 0) < 0)


def run_local(
    fn: Callable[..., int | None],
    world_size: int,
    args: tuple[Any, ...] = (),
    *,
    device: DeviceKind = "auto",
    timeout_s: float = 600.0,
    start_method: StartMethod | None = None,
    held: tuple[signal.Signals, ...] = (),
    came: Sequence[int] = (),
) -> int:
    """Run `fn(launch, device, *args)` in `world_size` processes here; returns an exit code.

    Each process has joined the process group before `fn` is called; `fn` must be importable by
    name, and what it returns (None: 0) is its exit code. The result is 0 if all were 0, else the
    code of the first rank that failed, 128 + n if signal n ended it. When a rank raises or dies,
    its own traceback is printed first and once ("error:" lines instead for a MegaliteError, which
    is the user's to fix), and the others are ended within about two seconds.
    SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 go to all ranks. Call it in the main thread.

    `held` are signals that ranks block until `fn` lets them in, so that none is lost while a rank
    starts; `came` are numbers of signals that came before the call and go to the ranks as well.
    """
    if world_size < 1:
        raise ConfigError(f"world size {world_size} must be at least 1")
    method = start_method or _start_method(device)
    context: Any = multiprocessing.get_context(method)
    listener = hold_port()
    ranks: list[_Rank] = []
    with _forwarding(ranks) as signals:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # none may miss a rank
            for rank in range(world_size):
                launch = Launch(
                    rank=rank,
                    world_size=world_size,
                    local_rank=rank,
                    local_world_size=world_size,
                    master_addr=listener.getsockname()[0],
                    master_port=listener.getsockname()[1],
                    source="local",
                )
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(fn, args, launch, device, timeout_s, listener, writer, held),
                    name=f"rank-{rank}",
                )
                process.start()
                writer.close()
                ranks.append(_Rank(rank, process, reader))
            listener.close()
            for number in list(came):
                os.kill(os.getpid(), number)  # pending until the next line lets them in
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            _watch(ranks)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            listener.close()
            _kill(ranks)
    return _conclude(ranks, signals)


def _start_method(device: DeviceKind) -> StartMethod:
    """fork shares the imported torch (0.05 s against 3 s a rank), but only while this process has
    one thread and CUDA is out of the game.
    """
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return "spawn"
    tasks = Path("/proc/self/task")
    single = threading.active_count() == 1 and tasks.is_dir() and len(list(tasks.iterdir())) == 1
    return "fork" if single else "spawn"


def _rank_main(
    fn: Callable[..., int | None],
    args: tuple[Any, ...],
    launch: Launch,
    device: DeviceKind,
    timeout_s: float,
    listener: socket.socket,
    reports: Connection,
    held: tuple[signal.Signals, ...],
) -> None:
    """One rank: join, call, report an exception, leave. Never returns."""
    _own_signals(held)
    _end_with_parent()
    if launch.rank != 0:
        listener.close()
    code = 1
    try:
        chosen = pick_device(launch, device)
        init_process(launch, chosen, timeout_s, listener=listener)
        code = fn(launch, chosen, *args) or 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        text = traceback.format_exc()
        if isinstance(error, MegaliteError):
            code, text = _CONFIG_EXIT, "\n".join(f"error: {e}" for e in str(error).splitlines())
        summary = traceback.format_exception_only(error)[0].splitlines()[0]
        of_peer = bool(getattr(error, "of_peer", False))
        reports.send(_Failure(time.monotonic(), text, summary, code, of_peer))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a normal exit: destructors of communicators whose peers are gone may wait for them.
    os._exit(code)


def _own_signals(held: tuple[signal.Signals, ...]) -> None:
    """Forget the launcher's handlers, and leave its process group: Ctrl-C reaches ranks once.

    Signals `held` stay blocked: `fn` lets them in when it can answer them.
    """
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # may come before `fn` has its handlers
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [n for n in FORWARDED if n not in held])


def _end_with_parent() -> None:
    """End this rank soon after its launcher is gone, however it went."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


@contextlib.contextmanager
def _forwarding(ranks: list[_Rank]) -> Iterator[list[int]]:
    """Send signals of this process on to all ranks; yields the list of those that came."""
    came: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for rank in ranks:
            if rank.process.pid is not None and rank.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(ranks: list[_Rank]) -> None:
    """Return when all ranks have ended, or soon after one failed."""
    deadline: float | None = None
    while running := [rank for rank in ranks if rank.alive]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if left == 0.0:
            return
        waiting: list[Any] = [rank.process.sentinel for rank in running]
        waiting += [rank.reports for rank in running if rank.failure is None]
        wait(waiting, timeout=0.5 if left is None else min(left, 0.5))
        for rank in ranks:
            rank.read()
            if rank.ended_at is None and not rank.alive:
                rank.ended_at = time.monotonic()
        if deadline is None and any(rank.failed for rank in ranks):
            deadline = time.monotonic() + _GRACE_S


def _kill(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.alive:
            rank.ended_by_us = True
            rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.read()


def _conclude(ranks: list[_Rank], signals: list[int]) -> int:
    """Print the first failure; returns the exit code of the whole."""
    first = _first_failure(ranks)
    if first is None:
        codes = [rank.process.exitcode or 0 for rank in ranks if not rank.ended_by_us]
        return next((code for code in codes if code), 0)
    code = first.process.exitcode or 0
    if first.failure is None:
        number = -code
        if number not in signals:
            name = signal.Signals(number).name
            _say(
                f"rank {first.rank} of {len(ranks)} was ended by signal {number} ({name})",
                ranks,
                first,
            )
        return 128 + number
    text = first.failure.text.rstrip()
    if first.failure.exit_code != _CONFIG_EXIT:
        text = f"rank {first.rank} of {len(ranks)} failed:\n{text}"
    _say(text, ranks, first)
    return first.failure.exit_code


def _first_failure(ranks: list[_Rank]) -> _Rank | None:
    """The rank whose failure made the others fail.

    A signal from outside (SIGKILL, SIGSEGV) is always a cause, though its death is seen last; an
    abort can be a peer's answer to a lost connection, so it counts by time like an exception.
    """

    def order(rank: _Rank) -> float:
        if rank.failure is not None:
            return math.inf if rank.failure.of_peer else rank.failure.when
        return (rank.ended_at or 0.0) if rank.process.exitcode == -signal.SIGABRT else 0.0

    return min((r for r in ranks if r.failed and not r.ended_by_us), key=order, default=None)


def _say(text: str, ranks: list[_Rank], first: _Rank) -> None:
    """Print the first failure and what became of the other ranks; an equal failure is told once."""
    others = []
    for rank in ranks:
        if rank is not first and rank.failure is not None:
            if not rank.failure.of_peer:
                others.append((rank.rank, rank.failure.summary))
        elif rank is not first and rank.ended_by_us:
            others.append((rank.rank, "ended by the launcher"))
    told = None if first.failure is None else (first.rank, first.failure.summary)
    print("\n".join([text, *retell(told, others)]), file=sys.stderr, flush=True)
