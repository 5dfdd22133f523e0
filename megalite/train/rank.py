"""One rank from its start to its exit code: join the others, train, print an error once, leave."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NoReturn

import torch

from megalite.config import RunConfig
from megalite.distributed.agree import PeerFailedError
from megalite.distributed.equality import require_same_config
from megalite.distributed.mesh import Mesh
from megalite.errors import MegaliteError, exit_code
from megalite.layout.topology import Topology
from megalite.process.affinity import bind_to_gpu
from megalite.process.board import Board
from megalite.process.compiled import CompileQueue, use_cache_of_host
from megalite.process.determinism import prepare_deterministic, use_deterministic
from megalite.process.env import abort_process, end_process, init_process
from megalite.process.gpu_variables import recorder_advice
from megalite.process.launcher import Launch
from megalite.process.secrets import Redaction
from megalite.process.signals import SignalFlag
from megalite.process.watch import Watch
from megalite.record.console import Console
from megalite.train.loop import Trainer
from megalite.train.memory_error import explained_out_of_memory

# Rank 0 may serve the board, so it waits at its end for others that still use it, at most so long.
# After an error on GPUs, where no exception ends the others, until their watches have read it.
_LINGER_S, _LINGER_FAILED_S = 1.0, 10.0

# A rank that is stuck reports where after this share of the collectives' timeout.
_WATCH_SHARE = 0.5


def run_rank_and_exit(
    work: Callable[..., int],
    launch: Launch,
    device: torch.device,
    arguments: tuple[Any, ...],
    timeout_s: float,
    flag: SignalFlag | None = None,
) -> NoReturn:
    """Run `work` as one of several ranks that a launcher started, and end the process.

    Joins the other ranks and calls `work(launch, device, *arguments)`, whose result is the exit
    code. An exception is printed instead, and gives its own code (`errors.exit_code`). With a
    `flag` that listens, a signal bounds the time that joining takes.
    """
    board: Board | None = None
    try:
        others = f"the other ranks, at the rendezvous {launch.master_addr}:{launch.master_port}"
        with (flag or SignalFlag()).bounds(others):
            init_process(launch, device, timeout_s)
        board = Board.of_world(launch.rank, launch.world_size)
        code = work(launch, device, *arguments)
        _leave(board)
        end_process()
    except Exception as error:
        # A failed rank ends at once: leaving the process group, or a normal exit of the
        # interpreter, may wait for peers that are waiting for this rank.
        report_error(error, launch, board)
        abort_process()
        _leave(board, _LINGER_FAILED_S if device.type == "cuda" else _LINGER_S)
        code = exit_code(error)
    sys.stdout.flush()
    os._exit(code)


def _leave(board: Board | None, linger_s: float = _LINGER_S) -> None:
    if board is not None:
        board.leave(linger_s)


def report_error(error: Exception, launch: Launch, board: Board | None) -> None:
    """Print an exception: its message if the user can fix it, otherwise the traceback.

    A message that several ranks would print is printed by one of them.
    """
    if isinstance(error, PeerFailedError):
        return  # the rank that failed prints its own error
    if not isinstance(error, MegaliteError):
        text = "".join(traceback.format_exception(error)).rstrip()
        _print_redacted(f"rank {launch.rank} of {launch.world_size} failed:\n{text}")
    elif board is None or board.first_to_report(str(error)):
        for line in str(error).splitlines():
            _print_redacted(f"[rank {launch.rank}] error: {line}")


def train_rank(
    launch: Launch,
    device: torch.device,
    config: RunConfig,
    accept: frozenset[str] = frozenset(),
    flag: SignalFlag | None = None,
) -> int:
    """One rank's run, inside its process group; returns the run's exit code.

    `accept`: settings that may differ from those of the checkpoint to resume from. After a run
    that no error ended, signals are ignored, so that they cannot replace its code.
    """
    signals = flag or SignalFlag()
    with signals:
        console = Console(quiet=launch.rank != 0)
        with joined_mesh(launch, device, config, accept, signals, console) as mesh:
            code = Trainer(config, mesh, console, accept, signals).run()
        signals.ignore()
        return code


@contextmanager
def joined_mesh(
    launch: Launch,
    device: torch.device,
    config: RunConfig,
    accept: frozenset[str] = frozenset(),
    signals: SignalFlag | None = None,
    console: Console | None = None,
) -> Iterator[Mesh]:
    """The mesh of this rank, with its groups, watched; the ranks have compared their configs.

    `signals`: those that the rank remembers. Out of memory is explained on the way out.
    """
    timeout_s = config.train.timeout_s
    console = console or Console(quiet=launch.rank != 0)
    if device.type == "cuda":  # before Triton is imported, and before there are threads
        bind_to_gpu(launch)
        use_cache_of_host(launch)
        if find_spec("triton") is not None:
            CompileQueue(console.print).install()
    if config.train.deterministic:
        prepare_deterministic()
        use_deterministic(True)
    mesh = Mesh(Topology.of(config.parallel), device, timeout_s=timeout_s)
    board = Board.of_world(launch.rank, launch.world_size)
    watch = Watch(
        mesh.ledger,
        timeout_s * _WATCH_SHARE,
        _print_redacted,
        board,
        asked_s=signals.asked_s if signals is not None else lambda since: 0.0,
        advice=recorder_advice() if mesh.backend == "nccl" else "",
    )
    try:
        with watch, explained_out_of_memory(config, mesh):
            # Configs are compared before groups are made, because settings decide the groups.
            require_same_config(config, mesh, accept)
            mesh.create()
            yield mesh
    finally:
        if launch.source == "local":  # otherwise `run_rank_and_exit` still uses its board
            _leave(board)


def _print_redacted(text: str) -> None:
    """Print to stderr, without keys and tokens of the environment."""
    print(Redaction()(text), file=sys.stderr, flush=True)
