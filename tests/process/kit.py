"""What test_local.py starts: a server that imports torch once and forks a launcher per job."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from megalite.distributed import comm
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError
from megalite.layout.topology import Topology
from megalite.process.local import run_local


def joined(launch):
    mesh = Mesh(Topology(tp=launch.world_size))
    comm.barrier(mesh.tp)
    return mesh


def trains(launch, device, text):
    mesh = joined(launch)
    total = comm.all_reduce(torch.tensor([launch.rank + 1.0]), mesh.tp)
    line = f"{text} rank {launch.rank} sum {total.item():g} threads {torch.get_num_threads()}\n"
    os.write(1, line.encode())  # one write: ranks share the file


def raises(launch, device, text):
    mesh = joined(launch)
    if launch.rank == 1:
        raise ValueError(f"the cause {text}")
    comm.barrier(mesh.tp)


def is_killed(launch, device, text):
    joined(launch)
    if launch.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def is_misconfigured(launch, device, text):
    joined(launch)
    raise ConfigError("parallel.tp=3 does not fit")


def returns_a_code(launch, device, text):
    joined(launch)
    return 75


def waits_for_a_signal(launch, device, text):
    """Ends with code 10 + rank 0's signal once every rank got it; SIGUSR1 only with handlers."""
    came: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: came.append(number))
    mesh = joined(launch)
    if launch.rank == 0:
        print("ready", flush=True)
    while comm.all_reduce(torch.tensor([float(bool(came))]), mesh.tp).item() < 2:
        time.sleep(0.02)
    return 10 + came[0]


def sleeps(launch, device, text):
    joined(launch)
    os.write(1, f"pid {os.getpid()}\n".encode())  # one write: ranks share the file
    time.sleep(600)


def main() -> None:
    """Fork a launcher for each line `scenario method folder` on stdin; answer with its pid.

    The launcher's output goes to `out` and `err` in its folder, its exit code, at last, to `code`.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        scenario, method, folder = line.split()
        pid = os.fork()
        if pid == 0:
            launch(globals()[scenario], method, Path(folder))
        print(pid, flush=True)


def launch(fn, method: Any, folder: Path) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    code: int | str = "raised"
    try:
        code = run_local(fn, 2, ("hello",), device="cpu", start_method=method)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    (folder / "part").write_text(str(code))
    (folder / "part").rename(folder / "code")
    os._exit(0)


if __name__ == "__main__":
    main()
