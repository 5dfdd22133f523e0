"""The ranks of a world compared before they are joined: the same kind of device, the same software.

A rank without a GPU among others that have one would wait for ever, or end in an error of NCCL that
names no host. Each rank writes what it has into the store that all meet in, rank 0 compares, and
all ranks end with the hosts named. The config is compared later, by distributed/equality.py.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

import torch
from torch._C._distributed_c10d import Store

from megalite.distributed.agree import PeerFailedError
from megalite.errors import ConfigError
from megalite.wording import number_of

_DEVICE = "device"
_VERDICT = "verdict"  # key of the store: what rank 0 found, as lines; empty if all are equal
_NUM_READ = "read"  # counter: the ranks that have read it

_MOST_HOSTS = 4  # that a line names for one value
_LINGER_S = 5.0  # rank 0 may serve the store, so where it ends the others read first


def own_traits(device: torch.device) -> dict[str, str]:
    """Traits that must be the same on all ranks, by name: the kind of device, and versions."""
    found = {
        _DEVICE: device.type,
        "megalite": _version("megalite"),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
    }
    if device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def require_same_traits(
    store: Store, rank: int, world_size: int, traits: Mapping[str, str], timeout_s: float
) -> None:
    """Raise ConfigError on rank 0 and PeerFailedError elsewhere unless all ranks have one `traits`.

    All ranks must call it. Raises DistStoreError where some have not after `timeout_s`.
    """
    timeout = timedelta(seconds=timeout_s)
    store.set(_key(rank), json.dumps({"host": socket.gethostname(), "traits": dict(traits)}))
    if rank != 0:
        store.wait([_VERDICT], timeout)
        problems = store.get(_VERDICT).decode()
        store.add(_NUM_READ, 1)
        if problems:
            raise PeerFailedError(problems)
        return

    keys = [_key(other) for other in range(world_size)]
    store.wait(keys, timeout)
    found = [json.loads(text) for text in store.multi_get(keys)]
    problems = "\n".join(_differences([(one["host"], one["traits"]) for one in found]))
    store.set(_VERDICT, problems)
    if problems:
        until = time.monotonic() + _LINGER_S
        while store.add(_NUM_READ, 0) < world_size - 1 and time.monotonic() < until:
            time.sleep(0.02)
        raise ConfigError(problems.splitlines())


def _differences(ranks: list[tuple[str, dict[str, str]]]) -> Iterator[str]:
    """Lines on what differs between the ranks, given as (host, traits) in order."""
    for name in dict.fromkeys(name for _, traits in ranks for name in traits):
        hosts: dict[str, list[str]] = {}  # by value: the host of each rank that has it
        for host, traits in ranks:
            hosts.setdefault(traits.get(name, "none"), []).append(host)
        if len(hosts) == 1 or (name in ("CUDA", "NCCL") and "none" in hosts):
            continue  # who has no GPU has no such version, which the line on the device says
        found = "; ".join(f"{value} on {_where(named)}" for value, named in hosts.items())
        if name == _DEVICE:
            remedy = "leave out the hosts without GPUs, or start all ranks with --device cpu"
        else:
            remedy = "install the same version on all hosts"
        yield f"the ranks differ in {name}: {found}; {remedy}"


def _where(hosts: list[str]) -> str:
    """Ranks counted, and their hosts named."""
    names = list(dict.fromkeys(hosts))
    more = f" and {len(names) - _MOST_HOSTS} more hosts" if len(names) > _MOST_HOSTS else ""
    ranks = number_of(len(hosts), "rank")
    return f"{ranks} ({', '.join(names[:_MOST_HOSTS])}{more})"


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return "none"


def _key(rank: int) -> str:
    return f"traits/{rank}"
