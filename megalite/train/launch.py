"""From a loaded config to running ranks: under torchrun or srun, alone, or started here.

What can be refused without torch is refused before torch is imported: a world that does not fit the
layout, left-over launcher variables, a checkpoint that must be there and is not. What a rank does
then is rank.py's.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from megalite.checks.schedule import require_schedule
from megalite.checks.settings import require_valid, resolve
from megalite.config import RunConfig
from megalite.config.load import Loaded
from megalite.errors import CheckpointError, ConfigError
from megalite.process.launcher import Launch, read_launch
from megalite.process.signals import CAUGHT, SignalFlag

_CHECKPOINT = re.compile(r"(?:\.replaced-)?step-\d{8,}")


def train_command(
    loaded: Loaded,
    *,
    local: bool,
    accept: frozenset[str] = frozenset(),
    flag: SignalFlag | None = None,
) -> None:
    """Run a config to its end and exit with the run's code (0, or 75 when saved on a signal).

    `flag` may have been put up earlier; signals that it remembers count as if they came now.
    """
    with flag or SignalFlag() as flag:
        launch = read_launch()
        config = _resolved(loaded, launch, local)
        require_checkpoint(config)
        code = _run_here(config, accept, flag) if local else _run_rank(launch, config, accept, flag)
        flag.ignore()
        sys.exit(code)


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


def _resolved(loaded: Loaded, launch: Launch, local: bool) -> RunConfig:
    """The config with what follows from the number of processes. Raises ConfigError."""
    if local and launch.source != "single":
        raise ConfigError(
            f"--local starts its own processes, but {launch.source} already started this one as "
            f"rank {launch.rank} of {launch.world_size}; leave one of the two out"
        )
    if not local and launch.source == "single":
        _require_launcher(resolve(loaded.config), launch)
    world_size = None if local else launch.world_size
    require_valid(loaded.config, world_size, loaded.origins)
    config = resolve(loaded.config, world_size)
    require_schedule(config)
    if not local:
        _require_launcher(config, launch)
    return config


def _run_here(config: RunConfig, accept: frozenset[str], flag: SignalFlag) -> int:
    """Start all ranks on this host; returns the exit code of the whole."""
    from megalite.process.local import run_local
    from megalite.train.rank import train_rank

    # Autograd imports this at the first backward, a second's work: here once for all forks.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return run_local(
        train_rank,
        _world_size(config),
        (config, accept),
        timeout_s=config.train.timeout_s,
        held=CAUGHT,
        came=flag.came,
    )


def _run_rank(launch: Launch, config: RunConfig, accept: frozenset[str], flag: SignalFlag) -> int:
    """Be a rank; with others it does not return."""
    from megalite.process.env import pick_device
    from megalite.train.rank import launched, train_rank

    device = pick_device(launch)
    if launch.world_size == 1:
        return train_rank(launch, device, config, accept, flag)
    launched(train_rank, launch, device, (config, accept, flag), config.train.timeout_s)


def _world_size(config: RunConfig) -> int:
    return config.parallel.tp * config.parallel.pp * (config.parallel.dp or 1)


def _require_launcher(config: RunConfig, launch: Launch) -> None:
    needed = _world_size(config)
    if needed != launch.world_size:
        parallel = config.parallel
        raise ConfigError(
            f"parallel.tp={parallel.tp} x pp={parallel.pp} x dp={parallel.dp} needs {needed} "
            f"processes, this is {launch.world_size}; add --local to start them here, or start "
            f"with torchrun --nproc-per-node={needed} --no-python megalite train ..."
        )
