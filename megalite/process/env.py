"""Joining the other processes: the device, the rendezvous, the process group.

launcher.py finds out which rank a process is; mesh.py makes the communicators inside the group.
Starts no processes: local.py does that on one host.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from megalite.errors import ConfigError, MegaliteError
from megalite.process.launcher import DeviceKind, Launch
from megalite.process.world_check import own_traits, require_same_traits
from megalite.wording import number_of


def pick_device(launch: Launch, kind: DeviceKind = "auto") -> torch.device:
    """The device of this process: cuda:<local rank>, the one GPU that its task sees, or cpu.

    "auto" takes CUDA where the machine has it. Raises `ConfigError` if CUDA is wanted and this host
    has fewer GPUs than processes, unless Slurm has bound one to each.
    """
    available = torch.cuda.is_available()
    if kind == "cpu" or (kind == "auto" and not available):
        return torch.device("cpu")
    count = torch.cuda.device_count() if available else 0
    needed = max(launch.local_world_size, launch.local_rank + 1)
    if count == 1 and launch.source == "slurm":
        return torch.device("cuda", 0)  # --gpus-per-task and --gpu-bind show a task its own alone
    if count < needed:
        fewer = f"start at most {number_of(count, 'process')} a host, or " * (count > 0)
        raise ConfigError(
            f"{number_of(needed, 'process')} on host {socket.gethostname()} need a "
            f"GPU each, but it has {count}; {fewer}add --device cpu"
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
    `listener` is a listening socket that rank 0 serves the rendezvous on, so its port is never free
    between choosing and using it. A process on the CPU computes with one thread unless
    OMP_NUM_THREADS sets another number, since the other ranks of the host need the other cores.
    Raises `ConfigError` as `check_interface` and `require_same_traits` do; another error while
    joining gets notes: the address, and the ranks that did not come.
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

    # Checked before joining: with a loopback address gloo would hang until the timeout.
    if chosen == "gloo" and launch.spans_hosts:
        check_interface()

    try:
        _join(launch, chosen, timeout, device if chosen == "nccl" else None, listener)
    except MegaliteError:
        raise  # it says all
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


def abort_process(within_s: float = 5.0) -> None:
    """Give up the communicators of a rank that has failed; takes at most so many seconds.

    On NCCL its unfinished operations end, and its connections close, so that those at the other
    ends get an error. To leave the group in order, as `end_process` does, would wait for ranks that
    wait for this one. gloo's connections close with the process.
    """
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return

    def abort() -> None:
        # Not `ProcessGroup.abort` of each group: their aborts would wait for each other.
        with suppress(Exception):  # the process ends, whatever it says
            dist.distributed_c10d._abort_process_group()

    thread = threading.Thread(target=abort, name="abort", daemon=True)
    thread.start()
    thread.join(within_s)


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
    store = _open_store(launch, timeout, listener)
    store.set(f"came/{launch.rank}", "")
    try:
        if launch.world_size > 1:
            traits = own_traits(device or torch.device("cpu"))
            require_same_traits(
                store, launch.rank, launch.world_size, traits, timeout.total_seconds()
            )
        dist.init_process_group(
            backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            device_id=device,
        )
    except Exception as error:
        with suppress(RuntimeError):  # the rank that serves the store may be gone
            ranks = range(launch.world_size)
            missing = [str(rank) for rank in ranks if not store.check([f"came/{rank}"])]
            if missing:
                error.add_note(f"did not come: rank {', '.join(missing)}")
        raise


def _open_store(launch: Launch, timeout: timedelta, listener: socket.socket | None) -> Store:
    """The store that the ranks meet in."""
    if launch.source == "torchrun" and dist.is_torchelastic_launched():
        # torch itself knows whether the agent serves the store, and which restart this is.
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        return PrefixStore("megalite", store)
    if launch.world_size == 1:
        return HashStore()

    listen_fd = None
    if listener is not None and launch.rank == 0:
        listen_fd = listener.detach()  # from now on the store owns the descriptor
    return TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.world_size,
        is_master=launch.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
