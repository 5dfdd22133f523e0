"""From a resolved config to running ranks: under torchrun or srun, alone, or started here.

What can be refused without torch is refused before torch is imported: a world that does not fit the
layout, left-over launcher variables, a checkpoint that must be there and is not. What a rank does
then is rank.py's.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from megalite.config import RunConfig
from megalite.errors import CheckpointError, ConfigError
from megalite.layout.topology import Topology
from megalite.process.launcher import Launch
from megalite.process.signals import CAUGHT, SignalFlag

_CHECKPOINT = re.compile(r"(?:\.replaced-)?step-\d{8,}")


def train_command(
    config: RunConfig,
    launch: Launch,
    *,
    local: bool,
    accept: frozenset[str] = frozenset(),
    flag: SignalFlag | None = None,
) -> None:
    """Run a resolved config to its end and exit with the run's code (0, or 75 saved on a signal).

    `launch` is how this process was started. `flag` may have been installed earlier; signals that
    it remembers count as if they came now. Raises ConfigError and CheckpointError before torch is
    imported.
    """
    with flag or SignalFlag() as flag:
        require_launcher(config, launch, local)
        require_checkpoint(config)
        code = _run_here(config, accept, flag) if local else _run_rank(launch, config, accept, flag)
        flag.ignore()
        sys.exit(code)


def require_launcher(config: RunConfig, launch: Launch, local: bool) -> None:
    """Raise ConfigError unless this process is one of as many as the layout needs, or starts them.

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
    """CheckpointError if checkpoint.resume asks for what a look at the folder's names refutes.

    Whether a checkpoint that is there is sound shows later.
    """
    root = Path(config.out) / config.name / "checkpoints"
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    found = sorted(name for name in names if _CHECKPOINT.fullmatch(name))
    if config.checkpoint.resume == "must" and not found:
        raise CheckpointError(
            f'checkpoint.resume="must", but {root} holds no checkpoint; '
            "check name and out, or set checkpoint.resume to auto"
        )
    if config.checkpoint.resume == "never" and found:
        raise CheckpointError(
            f'checkpoint.resume="never", but {root} holds {found[-1]}; '
            "give the run another name, or remove the folder"
        )


def _run_here(config: RunConfig, accept: frozenset[str], flag: SignalFlag) -> int:
    """Start all ranks on this host; returns the exit code of the whole."""
    from megalite.process.local import run_local
    from megalite.train.rank import train_rank

    # Autograd imports this at the first backward, a second's work: here once for all forks.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return run_local(
        train_rank,
        Topology.of(config.parallel).world_size,
        (config, accept),
        timeout_s=config.train.timeout_s,
        blocked=CAUGHT,
        received=flag.received,
    )


def _run_rank(launch: Launch, config: RunConfig, accept: frozenset[str], flag: SignalFlag) -> int:
    """Be a rank; with others it does not return."""
    from megalite.process.env import pick_device
    from megalite.train.rank import launched, train_rank

    device = pick_device(launch)
    if launch.world_size == 1:
        return train_rank(launch, device, config, accept, flag)
    launched(train_rank, launch, device, (config, accept, flag), config.train.timeout_s)
