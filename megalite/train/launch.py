"""From a resolved config to running ranks: under torchrun or srun, alone, or started here.

Checks that need no torch come before torch is imported, which takes seconds: the world size against
the layout, left-over launcher variables, and whether there is a checkpoint. rank.py runs a rank.
"""

from __future__ import annotations

import importlib
import sys

from megalite.checkpoint.names import checkpoints_of, list_steps
from megalite.checks import check_and_resolve
from megalite.config import RunConfig
from megalite.config.resume import require_resume_mode
from megalite.errors import ConfigError
from megalite.layout.topology import Topology
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

    local: start all ranks here; otherwise this process is one, started as `launch` describes.
    device: "auto" takes GPUs where there is one for each process. flag:
    may have been entered earlier; signals that it remembers count as if they came now. Raises
    ConfigError and CheckpointError before torch is imported.
    """
    with flag:
        require_launcher(config, launch, local)
        if config.parallel.dp is None:  # this process is alone, as the layout wants it
            config = check_and_resolve(config, launch.world_size)

        # Reported here, once: each rank would find it by itself, seconds later.
        require_checkpoint(config)
        require_resumable(config, accept)
        if local:
            code = _run_all_ranks(config, device, accept, flag)
        else:
            code = _run_this_rank(launch, config, device, accept, flag)
        flag.ignore()
        sys.exit(code)


def require_launcher(config: RunConfig, launch: Launch, local: bool) -> None:
    """Raise ConfigError unless the launcher started as many processes as the layout has ranks.

    local: this process starts all ranks, so no launcher may have started it.
    """
    if local and launch.source != "single":
        raise ConfigError(
            f"--local starts its own processes, but {launch.source} already started this one as "
            f"rank {launch.rank} of {launch.world_size}; leave one of the two out"
        )
    layout = Topology.of(config.parallel)
    if not local and layout.world_size != launch.world_size:
        raise ConfigError(
            f"parallel.tp={layout.tp} x pp={layout.pp} x dp={layout.dp} needs {layout.world_size} "
            f"processes, this is {launch.world_size}; add --local to start them here, or start "
            f"with torchrun --nproc-per-node={layout.world_size} --no-python megalite train ..."
        )


def require_checkpoint(config: RunConfig) -> None:
    """Raise CheckpointError if the names in the run's folder contradict checkpoint.resume.

    A checkpoint may still turn out to be damaged when the ranks read it.
    """
    root = checkpoints_of(config.folder)
    found = list_steps(root)
    require_resume_mode(config.checkpoint.resume, root, found[-1][1].name if found else None)


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
