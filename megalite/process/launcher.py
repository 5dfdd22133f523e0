"""The rank of this process and the size of its world, from torchrun's or Slurm's variables.

The only module that reads launcher variables. It imports no torch, so a wrong launch is refused at
once. The rules:

* A full set of torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) is
  used; a part of it (RANK, LOCAL_RANK or WORLD_SIZE without the others) is refused.
* A full set that torchrun did not make (no TORCHELASTIC_RUN_ID) inside a Slurm step of several
  tasks must agree with Slurm's variables. Otherwise another tool left it over, and it is refused.
* Without torchrun's variables, a Slurm step of several tasks is used; without that, this is a
  single process. The shell of salloc and a batch script have the variables of their job and no
  step, or a step of one task. MASTER_ADDR and MASTER_PORT alone mean nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from megalite.errors import ConfigError
from megalite.wording import number_of

DeviceKind = Literal["auto", "cpu", "cuda"]

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID")
_SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")

# Ports for Slurm jobs: below the range Linux hands out by itself (32768 and up), so that no
# outgoing connection of another program can hold one.
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000


@dataclass(frozen=True)
class Launch:
    """The place of this process among all that were started together."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1  # processes on this host
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    source: Literal["torchrun", "slurm", "local", "single"] = "single"

    @property
    def spans_hosts(self) -> bool:
        """True if processes on other hosts take part."""
        return self.local_world_size < self.world_size


def device_kind(text: str) -> DeviceKind:
    """The kind of device that an option names. Raises ConfigError for any other text."""
    kinds: tuple[DeviceKind, ...] = get_args(DeviceKind)
    for kind in kinds:
        if text == kind:
            return kind
    raise ConfigError(f"--device={text}: use {' or '.join(kinds)}")


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """The place of this process: by torchrun's variables, else by srun's, else a single process.

    Raises `ConfigError`, with every problem at once, if a launcher's variables are incomplete, not
    numbers, or contradict each other: a left-over RANK must not make a wrong world.
    """
    environ = os.environ if environ is None else environ
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _read_torchrun(environ)
    if environ.get("SLURM_PROCID", "0") != "0" or _slurm_tasks(environ) != "1":
        return _read_slurm(environ)
    return Launch()


def is_first_on_host(environ: Mapping[str, str] | None = None) -> bool:
    """True for the first process of a host, whichever launcher started it.

    It alone prints the errors that all processes of a host meet before they are joined.
    """
    try:
        return read_launch(environ).local_rank == 0
    except ConfigError:  # a place that cannot be read silences nobody
        return True


def first_host(node_list: str) -> str:
    """First host of a Slurm node list such as `gpu[007-010,12],login1`."""
    match = re.match(r"\s*([^\[,\s]+)(?:\[([^\]]*)\]([^,\s]*))?", node_list)
    if match is None:
        raise ConfigError(f"cannot read a host from the Slurm node list {node_list!r}")
    prefix, ranges, suffix = match.groups()
    if ranges is None:
        return prefix
    return f"{prefix}{re.split('[,-]', ranges)[0]}{suffix}"


def _read_torchrun(environ: Mapping[str, str]) -> Launch:
    missing = [name for name in TORCHRUN if name not in environ]
    if missing:
        raise ConfigError(
            f"found {_found(environ, TORCHRUN)} but not {', '.join(missing)}: start with "
            "torchrun, srun or --local, or unset the left-over variables"
        )
    problems: list[str] = []
    numbers = {n: _number(environ, n, problems) for n in TORCHRUN if n != "MASTER_ADDR"}
    rank, world_size, local_rank = numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"]
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", problems, world_size)
    launch = Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=environ["MASTER_ADDR"],
        master_port=numbers["MASTER_PORT"],
        source="torchrun",
    )
    _require_place(launch, "RANK", "WORLD_SIZE", problems)
    _require_agreement_with_slurm(launch, environ)
    return launch


def _read_slurm(environ: Mapping[str, str]) -> Launch:
    missing = [name for name in _SLURM if name not in environ]
    nodes = next((environ[name] for name in _SLURM_NODES if environ.get(name)), None)
    if nodes is None:
        missing.append(_SLURM_NODES[0])
    if missing or nodes is None:
        raise ConfigError(
            f"found {_found(environ, _SLURM)} but not {', '.join(missing)}: start with srun, or "
            "unset the left-over variables"
        )

    # Problems are collected, so that one attempt shows the user all of them.
    problems: list[str] = []
    of_step = {**environ, "SLURM_NTASKS": _slurm_tasks(environ)}
    rank, world_size, local_rank, job, step = (_number(of_step, n, problems) for n in _SLURM)
    launch = Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=_slurm_tasks_here(environ, world_size),
        master_addr=environ.get("MASTER_ADDR") or first_host(nodes),
        master_port=(
            _number(environ, "MASTER_PORT", problems)
            if "MASTER_PORT" in environ
            else _slurm_port(job, step)
        ),
        source="slurm",
    )
    _require_place(launch, "SLURM_PROCID", "SLURM_NTASKS", problems)
    return launch


def _require_agreement_with_slurm(launch: Launch, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if variables that torchrun did not set differ from those of the Slurm step.

    Torchrun's own may differ: srun starts one torchrun a node, and that starts the ranks.
    """
    tasks, task = _slurm_tasks(environ), environ.get("SLURM_PROCID", "0")
    if "TORCHELASTIC_RUN_ID" in environ or tasks == "1":
        return
    if (tasks, task) != (str(launch.world_size), str(launch.rank)):
        raise ConfigError(
            f"found RANK={launch.rank} of WORLD_SIZE={launch.world_size}, which torchrun did not "
            f"set, but srun says SLURM_PROCID={task} of SLURM_NTASKS={tasks}; unset the left-over "
            f"variables: {', '.join(TORCHRUN)}"
        )


def _found(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)


def _slurm_port(job: int, step: int) -> int:
    """A port by job and step numbers: two jobs, or two steps of a job, rarely get the same one."""
    return _FIRST_PORT + (job * 31 + step) % _NUM_PORTS


def _slurm_tasks(environ: Mapping[str, str]) -> str:
    """Number of tasks of this process's step; "1" outside of one.

    SLURM_NTASKS is the job's number in a batch script and in the shell of salloc, which may be a
    step of one task.
    """
    if "SLURM_STEP_ID" not in environ:
        return "1"
    return environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")


def _slurm_tasks_here(environ: Mapping[str, str], world_size: int) -> int:
    """Processes on this host: entry SLURM_NODEID of a list such as `4(x2),3`."""
    per_node: list[int] = []
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", layout):
        per_node += [int(tasks)] * int(repeats or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return per_node[node] if node < len(per_node) else world_size


def _number(
    environ: Mapping[str, str], name: str, problems: list[str], default: int | None = None
) -> int:
    """A variable as a whole number of at least 0. If it is none, adds to `problems`, returns 0."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit():
        problems.append(f"{name}={text!r} must be a whole number of at least 0")
        return 0
    return int(text)


def _require_place(launch: Launch, rank: str, world_size: str, problems: list[str]) -> None:
    if not problems and not launch.rank < launch.world_size:
        problems.append(
            f"{rank}={launch.rank} must be below {world_size}={launch.world_size}: ranks are "
            "counted from 0"
        )
    if not problems and not launch.local_rank < launch.local_world_size <= launch.world_size:
        problems.append(
            f"local rank {launch.local_rank} of "
            f"{number_of(launch.local_world_size, 'process')} on this host "
            f"does not fit a world of {launch.world_size}"
        )
    if problems:
        raise ConfigError(problems)
