"""How a process learns who it is, and how it joins the others.

The only module that reads launcher variables (torchrun's and Slurm's). It starts the process group;
communicators inside it are mesh.py's. It starts no processes: local.py does that on one host.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from megalite.errors import ConfigError

DeviceKind = Literal["auto", "cpu", "cuda"]

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")
_SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")

# Ports for Slurm jobs: below the range Linux hands out by itself (32768 and up), so that no
# outgoing connection of another program can hold one.
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000


@dataclass(frozen=True)
class Launch:
    """This process among all that were started together."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1  # processes on this host
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    source: Literal["torchrun", "slurm", "local", "single"] = "single"

    @property
    def spans_hosts(self) -> bool:
        """Whether other hosts take part."""
        return self.local_world_size < self.world_size


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Who this process is, from torchrun's variables, else srun's, else a single process.

    Raises `ConfigError`, with every problem at once, if a launcher's variables are incomplete, not
    numbers, or contradict each other: a left-over RANK must not make a wrong world.
    """
    environ = os.environ if environ is None else environ
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _read_torchrun(environ)
    # A batch script has SLURM_PROCID=0 and, unless asked for, no SLURM_NTASKS: one process.
    if environ.get("SLURM_PROCID", "0") != "0" or environ.get("SLURM_NTASKS", "1") != "1":
        return _read_slurm(environ)
    return Launch()


def pick_device(launch: Launch, kind: DeviceKind = "auto") -> torch.device:
    """The device of this process: cuda:<local rank> or cpu.

    "auto" takes CUDA where the machine has it. Raises `ConfigError` if CUDA is wanted and this host
    has fewer GPUs than processes.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={kind!r}; allowed are 'auto', 'cpu' and 'cuda'")
    available = torch.cuda.is_available()
    if kind == "cpu" or (kind == "auto" and not available):
        return torch.device("cpu")
    count = torch.cuda.device_count() if available else 0
    needed = max(launch.local_world_size, launch.local_rank + 1)
    if count < needed:
        raise ConfigError(
            f"{needed} processes on host {socket.gethostname()} need a GPU each, but it has "
            f"{count}; start at most {count} processes per host, or choose device 'cpu'"
        )
    return torch.device("cuda", launch.local_rank)


def init_process(
    launch: Launch,
    device: torch.device,
    timeout_s: float,
    *,
    backend: Literal["gloo", "nccl", "fake"] | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Join the world's process group: gloo on cpu, nccl on cuda with the device bound, or "fake".

    "fake" is for dry runs: any rank of any world in one process, and collectives move nothing.
    `listener` is a listening socket that rank 0 serves the rendezvous on, so that its port was
    never free between choosing and using it. A process on the CPU computes with one thread unless
    OMP_NUM_THREADS says otherwise, since its siblings want the other cores.
    """
    if device.type == "cpu" and launch.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = timedelta(seconds=timeout_s)
    if chosen == "fake":
        _join_fake(launch)
        return
    if chosen == "gloo" and launch.spans_hosts:
        check_interface()
    try:
        _join(launch, chosen, timeout, device if chosen == "nccl" else None, listener)
    except Exception as error:
        error.add_note(
            f"rank {launch.rank} of {launch.world_size} ({launch.source}) could not join the "
            f"others at {launch.master_addr}:{launch.master_port} within {timeout_s:g} s"
        )
        raise


def end_process() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_interface(environ: Mapping[str, str] | None = None, host: str | None = None) -> None:
    """Raise `ConfigError` if gloo would offer other hosts a loopback address.

    gloo advertises the address that this host's own name resolves to; many hosts map their name to
    127.0.0.1 or 127.0.1.1. GLOO_SOCKET_IFNAME names the interface to use instead.
    """
    environ = os.environ if environ is None else environ
    if environ.get("GLOO_SOCKET_IFNAME"):
        return
    host = socket.gethostname() if host is None else host
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = ""
    if address and not address.startswith("127."):
        return
    interfaces = [name for _, name in socket.if_nameindex() if name != "lo"]
    found = f"resolves to {address}" if address else "does not resolve"
    raise ConfigError(
        f"host name {host!r} {found}, which other hosts cannot reach; set GLOO_SOCKET_IFNAME to "
        f"the interface that reaches them, one of: {', '.join(interfaces) or 'none found'}"
    )


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """A listening socket on a free port of this host. Its port is taken as long as it is open."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.bind((host, 0))
    held.listen(4096)
    return held


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
    missing = [name for name in _TORCHRUN if name not in environ]
    if missing:
        raise ConfigError(
            f"found {_found(environ, _TORCHRUN)} but not {', '.join(missing)}: start with "
            "torchrun, srun or --local, or unset the left-over variables"
        )
    problems: list[str] = []
    numbers = {n: _number(environ, n, problems) for n in _TORCHRUN if n != "MASTER_ADDR"}
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
    problems: list[str] = []
    rank, world_size, local_rank, job = (_number(environ, n, problems) for n in _SLURM)
    launch = Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=_slurm_tasks_here(environ, world_size),
        master_addr=environ.get("MASTER_ADDR") or first_host(nodes),
        master_port=(
            _number(environ, "MASTER_PORT", problems)
            if "MASTER_PORT" in environ
            else _slurm_port(job, _number(environ, "SLURM_STEP_ID", problems, 0))
        ),
        source="slurm",
    )
    _require_place(launch, "SLURM_PROCID", "SLURM_NTASKS", problems)
    return launch


def _found(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)


def _slurm_port(job: int, step: int) -> int:
    """A port that two jobs, or two steps of one job, on a host do not share unless unlucky."""
    return _FIRST_PORT + (job * 31 + step) % _NUM_PORTS


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
    """A whole number of at least 0; notes a problem and gives 0 if it is none."""
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
            f"local rank {launch.local_rank} of {launch.local_world_size} processes on this host "
            f"does not fit a world of {launch.world_size}"
        )
    if problems:
        raise ConfigError(problems)


def _join_fake(launch: Launch) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group(
        "fake", store=FakeStore(), rank=launch.rank, world_size=launch.world_size
    )


def _join(
    launch: Launch,
    backend: str,
    timeout: timedelta,
    device: torch.device | None,
    listener: socket.socket | None,
) -> None:
    if launch.source == "torchrun":
        # torch itself knows whether the agent serves the store, and which restart this is.
        dist.init_process_group(backend, timeout=timeout, device_id=device)
        return
    if launch.world_size == 1:
        store: Store = HashStore()
    else:
        store = TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.world_size,
            is_master=launch.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if listener is None or launch.rank else listener.detach(),
        )
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device,
    )
