"""A long-lived pool of forked gloo ranks, so that a distributed test costs milliseconds.

The parent forks one *zygote* before it has any thread. On request the zygote, single-threaded for
ever, imports torch and forks the ranks of one world size; each set of ranks then lives until the
session ends or one of its ranks fails. A test passes a module-level function:

    def work(ctx, scale):                     # runs in every rank
        mesh = ctx.mesh(tp=2)
        return all_reduce(torch.ones(2) * scale, mesh.tp)

    def test_work(pool):
        results = pool.run(work, 2, 3.0)      # one result per rank

Every gloo group of a rank has threads that look around a hundred times a second for as long as it
lives. So ranks without work are stopped (SIGSTOP), and a set with many meshes gives way to another.

Results and arguments travel as pickles, by value. A function that fails in any rank ends its whole
set (the next run starts a new one), for messages in flight cannot be taken back.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

# Imported once, before the ranks are forked. The last one is what autograd imports (sympy and all)
# at a process's first backward.
PRELOAD = (
    "torch",
    "megalite.distributed.comm",
    "megalite.process.env",
    "megalite.train.loop",
    "torch.fx.experimental.symbolic_shapes",
)
_PR_SET_PDEATHSIG = 1  # of Linux' prctl
MAX_MESHES = 6  # a rank has at a time; about seven groups each


def traffic(ledger: Any) -> dict[str, dict[str, float]]:
    """Calls and bytes sent since a ledger's last reset, by "operation/axis"."""
    return {
        f"{op}/{axis}": {"calls": calls, "bytes_sent": ledger.bytes_sent[op, axis]}
        for (op, axis), calls in sorted(ledger.counts.items())
    }


class RankFailed(AssertionError):
    """A rank raised, died or did not answer; the message has the first one's own traceback."""


class RankContext:
    """What a test function gets in a rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._meshes: dict[tuple[Any, bool], Any] = {}

    @property
    def num_meshes(self) -> int:
        return len(self._meshes)

    def mesh(
        self,
        *,
        tp: int = 1,
        cp: int = 1,
        dp: int | None = None,
        pp: int = 1,
        ep: int | None = None,
    ) -> Any:
        """The mesh of this layout with all its groups made; `dp=None` takes the rest of the world.

        The groups of experts are made with an `ep` only, 1 included.

        Kept for later tests; its ledger starts from zero at each call.
        """
        from megalite.distributed.mesh import Mesh
        from megalite.layout.topology import Topology

        dp = dp or self.world_size // (tp * cp * pp)
        topology = Topology(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep or 1)
        key = (topology, ep is not None)
        if key not in self._meshes:
            self._meshes[key] = Mesh(topology, timeout_s=60.0)
            self._meshes[key].create()
            if ep is not None:
                self._meshes[key].create("ep", "edp")
        mesh = self._meshes[key]
        mesh.ledger.reset()
        mesh.ledger.phase = "test"
        return mesh


@dataclass
class _RankSet:
    """The parent's ends of the live ranks of one world size."""

    connections: list[Connection]
    pids: list[int]
    logs: list[Path] = field(default_factory=list)
    num_meshes: int = 0  # of each rank

    def signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for connection in self.connections:
            connection.close()


class RankPool:
    """Ranks for worlds of up to `max_world_size`, started when first asked for.

    Make it before the process has threads (pytest_configure), and close it at the end.
    """

    def __init__(self, max_world_size: int = 8, preload: tuple[str, ...] = PRELOAD) -> None:
        self.max_world_size = max_world_size
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._listener = Listener(str(self._folder / "socket"), family="AF_UNIX", backlog=64)
        self._sets: dict[int, _RankSet] = {}
        self._num_sets = 0
        mine, theirs = socket.socketpair()
        self._zygote_pid = os.fork()
        if self._zygote_pid == 0:
            mine.close()
            _zygote_main(theirs, self._folder, preload)
        theirs.close()
        self._control = mine

    def preload(self) -> None:
        """Let the zygote import torch now, beside what the parent does."""
        self._control.sendall(_order(0, 0))

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """`fn(ctx, *args)` in ranks 0 to world_size - 1; their results in rank order.

        Raises RankFailed if a rank raises, dies, or has not answered after `timeout_s`.
        """
        if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
            raise TypeError(f"{fn.__qualname__} must be a function at the top of its module")
        ranks = self._set_of(world_size)
        ranks.signal(signal.SIGCONT)
        call = pickle.dumps((list(sys.path), pickle.dumps((fn, args))))
        results: dict[int, Any] = {}
        try:
            for connection in ranks.connections:
                connection.send_bytes(call)
            failures = self._collect(ranks, results, timeout_s)
        except BaseException:
            self._drop(world_size)
            raise
        if failures:
            message = _report(fn.__qualname__, world_size, failures, ranks.logs)
            self._drop(world_size)
            raise RankFailed(message)
        if ranks.num_meshes > MAX_MESHES:
            self._drop(world_size)
        else:
            ranks.signal(signal.SIGSTOP)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all ranks and the zygote."""
        for world_size in list(self._sets):
            self._drop(world_size)
        self._control.close()
        os.waitpid(self._zygote_pid, 0)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(
        self, ranks: _RankSet, results: dict[int, Any], timeout_s: float
    ) -> list[tuple[int, str]]:
        """Fill `results`; returns (rank, what went wrong), the first to fail first."""
        waiting = {connection: rank for rank, connection in enumerate(ranks.connections)}
        failures: list[tuple[int, str]] = []
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if not failures:
                    failures = _stacks_of(ranks, sorted(waiting.values()), timeout_s)
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    failed, value, ranks.num_meshes = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    failed, value = True, "the process died"
                if failed:
                    failures.append((rank, value))
                    deadline = min(deadline, time.monotonic() + 0.3)  # peers may now hang
                else:
                    results[rank] = value
        return failures

    def _set_of(self, world_size: int) -> _RankSet:
        if not 1 <= world_size <= self.max_world_size:
            raise ValueError(f"world_size={world_size}; the pool has 1 to {self.max_world_size}")
        if world_size not in self._sets:
            self._sets[world_size] = self._start(world_size)
        return self._sets[world_size]

    def _start(self, world_size: int) -> _RankSet:
        self._num_sets += 1
        self._control.sendall(_order(world_size, self._num_sets))
        found: dict[int, tuple[Connection, int]] = {}
        while len(found) < world_size:
            connection = self._listener.accept()
            number, rank, pid = pickle.loads(connection.recv_bytes())
            if number == self._num_sets:
                found[rank] = (connection, pid)
        return _RankSet(
            connections=[found[rank][0] for rank in range(world_size)],
            pids=[found[rank][1] for rank in range(world_size)],
            logs=[_log_path(self._folder, self._num_sets, rank) for rank in range(world_size)],
        )

    def _drop(self, world_size: int) -> None:
        if world_size in self._sets:
            self._sets.pop(world_size).kill()


def _order(world_size: int, number: int) -> bytes:
    return world_size.to_bytes(2, "big") + number.to_bytes(4, "big")


def _log_path(folder: Path, number: int, rank: int) -> Path:
    return folder / f"set-{number}-rank-{rank}.log"


def _stacks_of(ranks: _RankSet, late: list[int], timeout_s: float) -> list[tuple[int, str]]:
    """Ask ranks that do not answer for their stacks."""
    for rank in late:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks.pids[rank], signal.SIGUSR1)
    time.sleep(0.2)
    return [(rank, f"no answer within {timeout_s} s; its stack is in its output") for rank in late]


def _report(name: str, world_size: int, failures: list[tuple[int, str]], logs: list[Path]) -> str:
    lines = [f"{name} failed in {len(failures)} of {world_size} ranks"]
    for rank, message in failures:
        lines += [f"---- rank {rank} ----", message.rstrip()]
        output = logs[rank].read_text(errors="replace")[-3000:].rstrip()
        if output:
            lines += [f"-- output of rank {rank}:", output]
    return "\n".join(lines)


def _zygote_main(control: socket.socket, folder: Path, preload: tuple[str, ...]) -> None:
    """Fork ranks on order until the parent closes its end. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks are reaped by the kernel
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    while True:
        order = control.recv(6, socket.MSG_WAITALL)
        if len(order) < 6:
            os._exit(0)
        for module in preload:
            importlib.import_module(module)
        world_size = int.from_bytes(order[:2], "big")
        number = int.from_bytes(order[2:], "big")
        if world_size == 0:
            continue
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(world_size)
            for rank in range(world_size):
                if os.fork() == 0:
                    # a stopped process would outlive everybody; this signal reaches it, too
                    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                    control.close()
                    _rank_main(rank, world_size, listener, folder, number)


def _rank_main(
    rank: int, world_size: int, listener: socket.socket, folder: Path, number: int
) -> None:
    """Answer calls until the parent closes its end. Never returns."""
    log = os.open(_log_path(folder, number, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        connection = Client(str(folder / "socket"), family="AF_UNIX")
        connection.send_bytes(pickle.dumps((number, rank, os.getpid())))
        context = _start_rank(rank, world_size, listener)
        while True:
            connection.send_bytes(_answer(context, connection.recv_bytes()))
    except (EOFError, ConnectionError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _start_rank(rank: int, world_size: int, listener: socket.socket) -> RankContext:
    import torch

    from megalite.process.env import init_process
    from megalite.process.launcher import Launch

    torch.set_num_threads(1)
    host, port = listener.getsockname()
    launch = Launch(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        master_addr=host,
        master_port=port,
        source="local",
    )
    init_process(launch, torch.device("cpu"), timeout_s=60.0, listener=listener)
    return RankContext(rank, world_size)


def _answer(context: RankContext, call: bytes) -> bytes:
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        sys.path[:], work = pickle.loads(call)  # the path first: it finds the test's module
        fn, args = pickle.loads(work)
        answer = (False, fn(context, *args), context.num_meshes)
        return pickle.dumps(answer)
    except Exception:
        return pickle.dumps((True, traceback.format_exc(), context.num_meshes))
