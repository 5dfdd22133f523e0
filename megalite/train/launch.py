"""From a resolved config to running ranks: under torchrun or srun, alone, or started here.

Whether the run can go on from its checkpoint is checked before torch is imported, which takes
seconds. start_checks.py has what is checked before; rank.py runs a rank.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from megalite.checks import check_and_resolve
from megalite.config import RunConfig
from megalite.layout.topology import Topology
from megalite.process.gpu_variables import prepare_gpus
from megalite.process.launcher import DeviceKind, Launch
from megalite.process.signals import SignalFlag
from megalite.train.start_checks import require_resumable

RankWork = Callable[..., int]


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
        code = run_ranks(
            _train_rank, config, launch, (accept,), local=local, device=device, flag=flag
        )
        flag.ignore()
        sys.exit(code)


def _train_rank() -> RankWork:
    from megalite.train.rank import train_rank

    # Autograd imports it at the first backward, which takes a second: once, before any fork.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return train_rank


def run_ranks(
    load_work: Callable[[], RankWork],
    config: RunConfig,
    launch: Launch,
    arguments: tuple[Any, ...],
    *,
    local: bool,
    device: DeviceKind,
    flag: SignalFlag | None = None,
) -> int:
    """Run a rank's work here, on this rank or on all, as `train_command`; returns an exit code.

    load_work: imports the function that is called on each rank with its launch, its device, the
    config, `arguments`, and the rank's own flag if there is a `flag`, which lets ranks remember
    signals. As one of several ranks that a launcher started, this process ends here.
    """
    if local:
        return _run_all_ranks(load_work, config, arguments, device, flag)
    return _run_this_rank(load_work, launch, config, arguments, device, flag)


def _run_all_ranks(
    load_work: Callable[[], RankWork],
    config: RunConfig,
    arguments: tuple[Any, ...],
    device: DeviceKind,
    flag: SignalFlag | None,
) -> int:
    """Start all ranks on this host; returns the run's exit code."""
    from megalite.process.local import run_local

    return run_local(
        load_work(),
        Topology.of(config.parallel).world_size,
        (config, *arguments),
        device=device,
        timeout_s=config.train.timeout_s,
        flag=flag,
    )


def _run_this_rank(
    load_work: Callable[[], RankWork],
    launch: Launch,
    config: RunConfig,
    arguments: tuple[Any, ...],
    kind: DeviceKind,
    flag: SignalFlag | None,
) -> int:
    """Run this process's rank: returns the exit code of a lone rank, otherwise ends the process."""
    if flag is not None:
        flag.listen()

    from megalite.process.env import pick_device
    from megalite.train.rank import run_rank_and_exit

    device = pick_device(launch, kind)
    handed = (config, *arguments, *(() if flag is None else (flag,)))
    if launch.world_size == 1:
        return load_work()(launch, device, *handed)
    run_rank_and_exit(load_work(), launch, device, handed, config.train.timeout_s, flag)
