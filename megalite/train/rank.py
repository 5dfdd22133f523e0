"""One rank's life: join, train, tell once what went wrong, leave."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from megalite.config import RunConfig
from megalite.distributed.agree import PeerFailedError, require_same_config
from megalite.distributed.mesh import Mesh
from megalite.errors import MegaliteError
from megalite.layout.topology import Topology
from megalite.process.board import Board
from megalite.process.determinism import prepare_deterministic, use_deterministic
from megalite.process.env import end_process, init_process
from megalite.process.launcher import Launch
from megalite.process.secrets import Redaction
from megalite.process.signals import SignalFlag
from megalite.process.watch import Watch
from megalite.train.loop import Trainer

# Exit codes of a rank that failed: by an error that the user can fix, by any other.
_USER_ERROR, _ERROR = 2, 1

# Rank 0 may serve the board: so long it stays at its end for others who still use it.
_LINGER_S = 1.0

# A rank says where it is stuck after this share of the collectives' timeout.
_WATCH_SHARE = 0.5


def launched(
    work: Callable[..., int],
    launch: Launch,
    device: torch.device,
    arguments: tuple[Any, ...],
    timeout_s: float,
) -> NoReturn:
    """`work(launch, device, *arguments)` as one of several ranks that a launcher started: join the
    others, work, tell what went wrong, end the process with the code.

    A failed rank ends at once: leaving the process group, or a normal exit of the interpreter, may
    wait for peers that are waiting for this rank.
    """
    board: Board | None = None
    try:
        init_process(launch, device, timeout_s)
        board = Board.of_world(launch.rank, launch.world_size)
        code = work(launch, device, *arguments)
        _part(board)
        end_process()
    except MegaliteError as error:
        code = _USER_ERROR
        tell(error, launch, board)
    except Exception:
        code = _ERROR
        text = traceback.format_exc().rstrip()
        _say(f"rank {launch.rank} of {launch.world_size} failed:\n{text}")
    if code in (_USER_ERROR, _ERROR):
        _part(board)
    sys.stdout.flush()
    os._exit(code)


def _part(board: Board | None) -> None:
    if board is not None:
        board.leave(_LINGER_S)


def tell(error: MegaliteError, launch: Launch, board: Board | None) -> None:
    """Print an error that the user can fix: once, where all ranks have the same one."""
    if isinstance(error, PeerFailedError):
        return  # that rank tells
    text = str(error)
    if board is None or board.first_to_report(text):
        for line in text.splitlines():
            _say(f"[rank {launch.rank}] error: {line}")


def train_rank(
    launch: Launch,
    device: torch.device,
    config: RunConfig,
    accept: frozenset[str] = frozenset(),
    flag: SignalFlag | None = None,
) -> int:
    """One rank's run, inside its process group; returns the run's exit code.

    `accept`: settings that may differ from those of the checkpoint to resume from. After a run
    that was not cut by an error, SIGTERM and SIGUSR1 are ignored: its code stands.
    """
    timeout_s = config.train.timeout_s
    if config.train.deterministic:
        prepare_deterministic()
        use_deterministic(True)
    with flag or SignalFlag() as flag:
        topology = Topology.of(config.parallel)
        mesh = Mesh(topology, device, timeout_s=timeout_s)
        require_same_config(config, mesh, accept)
        mesh.create()
        board = Board.of_world(launch.rank, launch.world_size)
        leaving = flag
        after_s = timeout_s * _WATCH_SHARE
        try:
            with Watch(mesh.ledger, after_s, _say, board, leaving=lambda: leaving.raised):
                code = Trainer(config, mesh, accept=accept, flag=flag).run()
        finally:
            if launch.source == "local":  # else the launched process still uses its board
                _part(board)
        flag.ignore()
        return code


def _say(line: str) -> None:
    print(Redaction()(line), file=sys.stderr, flush=True)
