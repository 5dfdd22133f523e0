"""What test_launch.py starts: a server that has torch imported and forks a command line per job."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megalite.cli.main import main as megalite
from megalite.errors import DataError
from megalite.process import (
    local,  # noqa: F401  imported once for all jobs, torch with it
    signals,
    watch,
)
from megalite.process.launcher import Launch
from megalite.train import rank
from megalite.train.loop import Trainer
from megalite.train.run_data import open_data
from megalite.train.start_checks import require_resumable


def raises(trainer: Trainer) -> None:
    if trainer.mesh.rank == 1:
        raise ValueError("the cause")


def raises_in_a_forward(trainer: Trainer) -> None:
    if trainer.mesh.rank == 1:

        def forward(*arguments: Any, **named: Any) -> Any:
            raise ValueError("the cause")

        trainer.engine.chunks[0].forward = forward


def spoils_a_gradient(trainer: Trainer) -> None:
    optimizer = trainer.engine.optimizer
    wait = optimizer._reducers[0].wait

    def wait_and_spoil() -> None:
        wait()
        if trainer.mesh.rank == 1:
            optimizer._buffers[0].grads[3] = math.nan

    optimizer._reducers[0].wait = wait_and_spoil


def cannot_open() -> None:
    """Rank 1 does not find its data, which the others have."""

    def fail(config: Any) -> Any:
        if dist.get_rank() == 1:
            raise DataError("data.path=here: no such file")
        return open_data(config)

    mock.patch("megalite.train.loop.open_data", fail).start()


def signalled_before_the_ranks() -> None:
    """SIGUSR1 comes while the launcher still looks at the config."""

    def signal_and_require(config: Any, accept: frozenset[str]) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        require_resumable(config, accept)

    mock.patch("megalite.train.launch.require_resumable", signal_and_require).start()


def signalled_while_a_rank_starts() -> None:
    """SIGUSR1 comes to rank 1 alone, before it has a mesh."""
    start = rank.train_rank

    def signal_and_start(launch: Any, *arguments: Any, **named: Any) -> int:
        if launch.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return start(launch, *arguments, **named)

    rank.train_rank = signal_and_start


def terminated_late() -> None:
    """SIGTERM comes to the launcher, once, and to each rank when all is done and saved."""
    start = rank.train_rank

    def start_and_terminate(launch: Launch, *arguments: Any, **named: Any) -> int:
        code = start(launch, *arguments, **named)
        if launch.rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        return code

    rank.train_rank = start_and_terminate


def leaves_soon() -> None:
    """Who is asked to leave waits for others for three seconds, not for twenty."""
    for module in (signals, watch):
        mock.patch.object(module, "LEAVE_S", 3.0).start()
    watch._LEAVE_STUCK_S = 1.0


def ignores_hangups() -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


# Faults of the second step, and faults of the whole process.
FAULTS = {fault.__name__: fault for fault in (raises, raises_in_a_forward, spoils_a_gradient)}
SETUPS = {
    setup.__name__: setup
    for setup in (
        cannot_open,
        signalled_before_the_ranks,
        signalled_while_a_rank_starts,
        terminated_late,
        leaves_soon,
        ignores_hangups,
    )
}


def inject(name: str) -> None:
    """Let a fault happen: in each rank at the start of its second step, or where it says."""
    if name in SETUPS:
        SETUPS[name]()
        return
    step = Trainer._step

    def faulty_step(self: Trainer, flag: Any) -> Any:
        if self.step == 1:
            FAULTS[name](self)
        return step(self, flag)

    Trainer._step = faulty_step


def run(job: dict[str, Any]) -> None:
    """In a fork: the command line as `megalite ARGUMENTS` would run it; code, out, err to files."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = Path(job["folder"])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(job["environment"])
    if job["fault"]:
        inject(job["fault"])
    sys.argv = ["megalite", *job["arguments"]]
    code: Any = "raised"
    try:
        megalite()
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 99)


def main() -> None:
    """Fork a job for each line of JSON on stdin; answer with its pid, and with its code if asked.

    A line that is a number asks for the exit code of that pid.
    """
    for line in sys.stdin:
        job = json.loads(line)
        if isinstance(job, int):
            _, status = os.waitpid(job, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            run(job)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
