"""The cores of a rank: those near its GPU, shared evenly among the ranks that are near them.

A rank whose threads wander to the other socket pays for every launch and every copy twice. Memory
follows: Linux gives a page to the node whose core touches it first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.process.launcher import Launch

_SYS = Path("/sys")


def bind_to_gpu(launch: Launch, sys: Path = _SYS) -> frozenset[int] | None:
    """Bind this process, whose GPU is that of its local rank, to its share of the near cores.

    Returns the cores; None where nothing was done: a task of srun, which binds as the user asked,
    a process that is bound already, or a host that does not say which cores are near.
    """
    if launch.source not in ("torchrun", "local"):
        return None
    if torch.cuda.device_count() < launch.local_world_size:
        return None
    near = [_near_cores(sys, index) for index in range(launch.local_world_size)]
    cores = share_of_cores(sys, launch.local_rank, near, frozenset(os.sched_getaffinity(0)))
    if cores is not None:
        os.sched_setaffinity(0, cores)
    return cores


def share_of_cores(
    sys: Path, local_rank: int, near: Sequence[frozenset[int]], allowed: frozenset[int]
) -> frozenset[int] | None:
    """The logical cores for a rank of a host, of which `near` has those near each rank's GPU.

    Ranks that are near the same cores share them by physical cores: the two threads of a core never
    belong to two ranks. None if there is no choice to make, or not a core for each rank.
    """
    mine = near[local_rank] & allowed
    if not mine or allowed <= near[local_rank]:
        return None
    physical = sorted({min(_siblings(sys, core) & mine) for core in mine})
    sharing = [rank for rank, cores in enumerate(near) if cores == near[local_rank]]
    share = len(physical) // len(sharing)
    first = sharing.index(local_rank) * share
    found = frozenset[int]().union(
        *(_siblings(sys, core) & mine for core in physical[first : first + share])
    )
    return found or None


def _near_cores(sys: Path, index: int) -> frozenset[int]:
    """The logical cores near a GPU; none if the host does not say."""
    gpu: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks these three
    try:
        place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    except AttributeError:  # an old torch, or another maker's device
        return frozenset()
    return _read_list(sys / "bus/pci/devices" / place / "local_cpulist")


def _siblings(sys: Path, core: int) -> frozenset[int]:
    """The logical cores of a core's physical one, itself among them."""
    path = sys / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    return _read_list(path) | {core}


def _read_list(path: Path) -> frozenset[int]:
    """The numbers of a list as the kernel writes it, such as 0-3,8; none if it cannot be read."""
    try:
        ranges = [part.partition("-") for part in path.read_text().strip().split(",") if part]
        spans = [range(int(first), int(last or first) + 1) for first, _, last in ranges]
    except (OSError, ValueError):
        return frozenset()
    return frozenset(number for span in spans for number in span)
