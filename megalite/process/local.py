"""Start all ranks of a world on this host, pass signals on to them, and end all when one fails.

For `megalite train --local` and for laptops; clusters use torchrun or srun. It does not restart
ranks. Reading order: `run_local`, then `_rank_main`, which runs in each child process.
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch

from megalite.errors import EXIT_FAULT, EXIT_SAVED, EXIT_USER, ConfigError, MegaliteError
from megalite.process.env import hold_port, init_process, pick_device
from megalite.process.failures import RankFailure, summarize
from megalite.process.launcher import DeviceKind, Launch
from megalite.process.signals import CAUGHT, SignalFlag, leave_now
from megalite.process.terminal import replace_unencodable, show_cursor
from megalite.wording import number_of

StartMethod = Literal["fork", "spawn"]

# After one rank failed: seconds that the others may take to notice by themselves. Then they are
# killed.
_GRACE_S = 1.0


@dataclass
class _Report:
    """The report of a rank that raised, sent through its pipe."""

    when: float  # seconds of the host's monotonic clock, which all processes share
    text: str  # a traceback, or "error:" lines if the user can fix the error
    summary: str  # the exception in one line
    exit_code: int
    of_peer: bool = False  # the error only passes on that another rank failed


@dataclass
class _Rank:
    """The launcher's view of one rank."""

    rank: int
    process: BaseProcess
    pipe: Connection
    report: _Report | None = None  # None: it has not raised
    ended_at: float | None = None  # monotonic seconds at which its end was noticed
    killed_by_launcher: bool = False

    def receive(self) -> None:
        """Take the rank's report from the pipe, if there is one."""
        with contextlib.suppress(EOFError, OSError):
            if not self.pipe.closed and self.pipe.poll():
                self.report = self.pipe.recv()

    @property
    def alive(self) -> bool:
        return self.process.exitcode is None

    @property
    def failed(self) -> bool:
        """True if the rank raised, was ended by a signal or left with the code of a failure."""
        return self.report is not None or self.process.exitcode not in (None, 0, EXIT_SAVED)


def run_local(
    fn: Callable[..., int | None],
    world_size: int,
    args: tuple[Any, ...] = (),
    *,
    device: DeviceKind = "auto",
    timeout_s: float = 600.0,
    start_method: StartMethod | None = None,
    flag: SignalFlag | None = None,
) -> int:
    """Run `fn(launch, device, *args)` in `world_size` processes here; returns an exit code.

    Each process has joined the process group before `fn` is called; `fn` must be importable by
    name, and its return value (None: 0) is the rank's exit code. The result is 0 if all were 0,
    else the code of the first rank that failed, 128 + n if signal n ended it. When a rank raises or
    dies, its own traceback is printed first and once ("error:" lines instead for a MegaliteError,
    which the user can fix), and the others are ended within about two seconds.
    Signals in CAUGHT go to all ranks; a second one kills them and ends this process. Call it in the
    main thread.

    device: "auto" takes the GPUs if there is one for each rank. If there are fewer, a line is
    printed and the ranks run on the CPU.

    With a `flag`, which may have signals from before the call, ranks remember signals from their
    first moment: `fn` gets the rank's own flag as the argument `flag`. Otherwise they end by them.
    Raises ConfigError for a world without ranks.
    """
    if world_size < 1:
        raise ConfigError(f"world size {world_size} must be at least 1")
    device = _kind_for(world_size, device)
    method = start_method or _start_method(device)
    context: Any = multiprocessing.get_context(method)
    listener = hold_port()
    ranks: list[_Rank] = []
    signals = flag or SignalFlag("")
    with signals:
        try:
            # Blocked while ranks start: a signal passed on now would miss those not yet started.
            signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
            for launch in _launches(world_size, listener):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(fn, args, launch, device, timeout_s, listener, writer, flag is not None),
                    name=f"rank-{launch.rank}",
                )
                process.start()
                writer.close()  # so that the pipe ends with the rank
                ranks.append(_Rank(launch.rank, process, reader))
            listener.close()

            def end(code: int) -> None:
                _send(ranks, signal.SIGKILL)
                leave_now(code)

            signals.pass_on, signals.end = partial(_send, ranks), end
            for number in signals.received:
                _send(ranks, number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
            _wait_for_end(ranks)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
            listener.close()
            _kill(ranks)
            show_cursor()  # hidden by the bar of a rank that was killed
    return _conclude(ranks, signals)


def _launches(world_size: int, listener: socket.socket) -> list[Launch]:
    """The place of each rank, in order; `listener` has the address of the rendezvous."""
    address, port = listener.getsockname()
    return [
        Launch(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_addr=address,
            master_port=port,
            source="local",
        )
        for rank in range(world_size)
    ]


def _kind_for(world_size: int, kind: DeviceKind) -> DeviceKind:
    """The kind of device that all ranks of this host take; "auto" is decided here, once."""
    if kind != "auto":
        return kind
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < count < world_size:
        gpus = number_of(count, "GPU")
        print(
            f"{number_of(world_size, 'process')} and {gpus} here: they run on the CPU", flush=True
        )
    return "cuda" if count >= world_size else "cpu"


def _start_method(device: DeviceKind) -> StartMethod:
    """The start method: "fork" where it is safe, else "spawn".

    A fork shares the imported torch (0.05 s against 3 s a rank). It is safe while this process has
    one thread and CUDA is not used.
    """
    if device == "cuda":
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
    pipe: Connection,
    flagged: bool,
) -> None:
    """Body of a rank's process: join, call `fn`, report an exception. Ends the process."""
    # Before the slow part: signals and the launcher's end may come at any time.
    flag = SignalFlag()
    flag.place(launch)
    _set_up_signals(flag if flagged else None)
    _end_with_parent()
    replace_unencodable()
    if launch.rank != 0:
        listener.close()  # rank 0 serves the rendezvous on it

    code = EXIT_FAULT
    try:
        chosen = pick_device(launch, device)
        with flag.bounds("the other ranks, at the rendezvous"):
            init_process(launch, chosen, timeout_s, listener=listener)
        code = fn(launch, chosen, *args, **({"flag": flag} if flagged else {})) or 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        text = traceback.format_exc()
        if isinstance(error, MegaliteError):
            code = EXIT_USER
            text = "\n".join(f"error: {line}" for line in str(error).splitlines())
        summary = traceback.format_exception_only(error)[0].splitlines()[0]
        of_peer = bool(getattr(error, "of_peer", False))
        pipe.send(_Report(time.monotonic(), text, summary, code, of_peer))

    sys.stdout.flush()
    sys.stderr.flush()
    # Not a normal exit: destructors of communicators whose peers are gone may wait for them.
    os._exit(code)


def _set_up_signals(flag: SignalFlag | None) -> None:
    """Replace the launcher's handlers, and leave its process group.

    In a group of its own a rank gets Ctrl-C once, passed on by the launcher, and not from the
    terminal as well. Without a flag the signals end the rank; SIGUSR1 may come before `fn` has a
    handler for it.
    """
    os.setpgid(0, 0)
    for number in CAUGHT:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if flag is None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
    else:
        flag.__enter__()  # for as long as the process lives
        flag.listen()


def _end_with_parent() -> None:
    """Start a thread that kills this rank soon after its launcher ended, however it ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _send(ranks: list[_Rank], number: int) -> None:
    """Send a signal to all ranks that live."""
    for rank in ranks:
        if rank.process.pid is not None and rank.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, number)


def _wait_for_end(ranks: list[_Rank]) -> None:
    """Return when all ranks have ended, or `_GRACE_S` after one failed."""
    deadline: float | None = None
    while running := [rank for rank in ranks if rank.alive]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if left == 0.0:
            return
        waiting: list[Any] = [rank.process.sentinel for rank in running]
        waiting += [rank.pipe for rank in running if rank.report is None]
        wait(waiting, timeout=0.5 if left is None else min(left, 0.5))
        for rank in ranks:
            rank.receive()
            if rank.ended_at is None and not rank.alive:
                rank.ended_at = time.monotonic()
        if deadline is None and any(rank.failed for rank in ranks):
            deadline = time.monotonic() + _GRACE_S


def _kill(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.alive:
            rank.killed_by_launcher = True
            rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.receive()


def _conclude(ranks: list[_Rank], flag: SignalFlag) -> int:
    """Print the first failure; returns the exit code of the whole."""
    first = _first_failure(ranks)
    if first is None:
        codes = [rank.process.exitcode or 0 for rank in ranks if not rank.killed_by_launcher]
        return next((code for code in codes if code), 0)

    # Without a report a signal ended it, or it left after printing why. A signal that this process
    # passed on is no failure to print: the ranks were asked to end.
    if first.report is None:
        code = first.process.exitcode or 0
        text = f"rank {first.rank} of {len(ranks)} ended with code {code}"
        if code < 0:
            name = signal.Signals(-code).name
            text = f"rank {first.rank} of {len(ranks)} was ended by signal {-code} ({name})"
        if -code not in flag.received:
            _print_failures(text, ranks, first)
        return code if code > 0 else 128 - code

    text = first.report.text.rstrip()
    if first.report.exit_code != EXIT_USER:
        text = f"rank {first.rank} of {len(ranks)} failed:\n{text}"
    _print_failures(text, ranks, first)
    return first.report.exit_code


def _first_failure(ranks: list[_Rank]) -> _Rank | None:
    """The rank whose failure made the others fail; None if no rank failed."""

    def order(rank: _Rank) -> float:
        """The time of the failure, 0 for a certain cause, infinity for a mere consequence."""
        if rank.report is not None:
            return math.inf if rank.report.of_peer else rank.report.when
        # An abort can be the answer to a connection that a peer lost, so it counts by time. Other
        # signals (SIGKILL, SIGSEGV) come from outside: a cause, though the death is noticed last.
        code = rank.process.exitcode or 0
        if code == -signal.SIGABRT or code > 0:
            return rank.ended_at or 0.0
        return 0.0

    failed = [rank for rank in ranks if rank.failed and not rank.killed_by_launcher]
    return min(failed, key=order, default=None)


def _print_failures(text: str, ranks: list[_Rank], first: _Rank) -> None:
    """Print the first failure, then the ends of the other ranks; equal failures once."""
    others = []
    for rank in ranks:
        if rank is first:
            continue
        if rank.report is not None:
            if not rank.report.of_peer:  # else it repeats the failure of another rank
                others.append(RankFailure(rank.rank, rank.report.summary))
        elif rank.killed_by_launcher:
            others.append(RankFailure(rank.rank, "ended by the launcher"))
    cause = None if first.report is None else RankFailure(first.rank, first.report.summary)
    print("\n".join([text, *summarize(cause, others)]), file=sys.stderr, flush=True)
