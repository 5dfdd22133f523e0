"""From a resolved config to running ranks: under torchrun or srun, alone, or started here.

Whether the run can go on from its checkpoint is checked before torch is imported, which takes
seconds. start_checks.py has what is checked before; rank.py runs a rank.
"""

from __future__ import annotations

import importlib
import sys

from megalite.checks import check_and_resolve
from megalite.config import RunConfig
from megalite.layout.topology import Topology
from megalite.process.gpu_variables import prepare_gpus
from megalite.process.launcher import DeviceKind, Launch
from megalite.process.signals import SignalFlag
from megalite.train.start_checks import require_resumable


def train_command(
    config: RunConfig,
    launch: Launch,
    *,
    local: bool,
    device: DeviceKind,
    accept: frozenset[str],
    flag: SignalFlag,
) -> None:
    """Run a checked config to its end and exit with the run's code (0, or 75 saved on a signal).

    The config has passed `launcher_problems` and `start_problems`.

    local: start all ranks here; otherwise this process is one, started as `launch` describes.
    device: "auto" takes GPUs where there is one for each process. flag:
    may have been entered earlier; signals that it remembers count as if they came now. Raises
    CheckpointError before torch is imported.
    """
    with flag:
        if config.parallel.dp is None:  # this process is alone, as the layout wants it
            config = check_and_resolve(config, launch.world_size)

        # Reported here, once: each rank would find it by itself, seconds later.
        require_resumable(config, accept)
        if device != "cpu":
            prepare_gpus(config.folder)
        if local:
            code = _run_all_ranks(config, device, accept, flag)
        else:
            code = _run_this_rank(launch, config, device, accept, flag)
        flag.ignore()
        sys.exit(code)


def _run_all_ranks(
    config: RunConfig, device: DeviceKind, accept: frozenset[str], flag: SignalFlag
) -> int:
    """Start all ranks on this host; returns the run's exit code."""
    from megalite.process.local import run_local
    from megalite.train.rank import train_rank

    # Autograd imports it at the first backward, which takes a second: once, before the forks.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return run_local(
        train_rank,
        Topology.of(config.parallel).world_size,
        (config, accept),
        device=device,
        timeout_s=config.train.timeout_s,
        flag=flag,
    )


def _run_this_rank(
    launch: Launch, config: RunConfig, kind: DeviceKind, accept: frozenset[str], flag: SignalFlag
) -> int:
    """Run this process's rank: returns the exit code of a lone rank, otherwise ends the process."""
    flag.listen()

    from megalite.process.env import pick_device
    from megalite.train.rank import run_rank_and_exit, train_rank

    device = pick_device(launch, kind)
    if launch.world_size == 1:
        return train_rank(launch, device, config, accept, flag)
    timeout_s = config.train.timeout_s
    run_rank_and_exit(train_rank, launch, device, (config, accept, flag), timeout_s, flag)
