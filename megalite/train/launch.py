"""From a loaded config to running ranks: under torchrun or srun, alone, or started here.

Everything that can be refused without a process group is refused before one is made.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import torch

from megalite.config import RunConfig
from megalite.config_check import require_valid, resolve
from megalite.config_load import Loaded
from megalite.distributed.env import Launch, end_process, init_process, pick_device, read_launch
from megalite.distributed.local import run_local
from megalite.distributed.mesh import Mesh
from megalite.distributed.watch import Watch
from megalite.errors import ConfigError, MegaliteError
from megalite.topology import Topology
from megalite.train.agreement import require_same_config
from megalite.train.trainer import Trainer

# Exit codes of a rank that failed: by an error that the user can fix, by any other.
_USER_ERROR, _ERROR = 2, 1

# A rank says where it is stuck after this share of the collectives' timeout.
_WATCH_SHARE = 0.5


def train_command(loaded: Loaded, *, local: bool, accept: frozenset[str] = frozenset()) -> None:
    """Run a config to its end and exit with the run's code (0, or 75 when saved on a signal)."""
    launch = read_launch()
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
    if local:
        # Autograd imports this at the first backward, a second's work: here once for all forks.
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
        timeout_s = config.train.timeout_s
        sys.exit(run_local(train_rank, _world_size(config), (config, accept), timeout_s=timeout_s))
    _require_launcher(config, launch)
    device = pick_device(launch)
    if launch.world_size == 1:
        sys.exit(train_rank(launch, device, config, accept))
    _run_launched(launch, device, config, accept)


def _run_launched(
    launch: Launch, device: torch.device, config: RunConfig, accept: frozenset[str]
) -> None:
    """One of several ranks that a launcher started: run, tell what went wrong, end the process.

    A failed rank ends at once: leaving the process group, or a normal exit of the interpreter, may
    wait for peers that are waiting for this rank.
    """
    try:
        init_process(launch, device, config.train.timeout_s)
        code = train_rank(launch, device, config, accept)
        end_process()
    except MegaliteError as error:
        code = _USER_ERROR
        for line in str(error).splitlines():
            _say(f"[rank {launch.rank}] error: {line}")
    except Exception:
        code = _ERROR
        text = traceback.format_exc().rstrip()
        _say(f"rank {launch.rank} of {launch.world_size} failed:\n{text}")
    sys.stdout.flush()
    os._exit(code)


def train_rank(
    launch: Launch,
    device: torch.device,
    config: RunConfig,
    accept: frozenset[str] = frozenset(),
) -> int:
    """One rank's run, inside its process group; returns the run's exit code.

    `accept`: settings that may differ from those of the checkpoint to resume from.
    """
    parallel, timeout_s = config.parallel, config.train.timeout_s
    topology = Topology(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp or 1)
    mesh = Mesh(topology, device, timeout_s=timeout_s)
    require_same_config(config, mesh, accept)
    mesh.create()
    with Watch(mesh.ledger, timeout_s * _WATCH_SHARE, _say):
        return Trainer(config, mesh, accept=accept).run()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
