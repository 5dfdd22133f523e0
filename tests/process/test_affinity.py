"""Cores near a GPU: which ones a rank gets, and where it is left alone."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalite.process.affinity import bind_to_gpu, share_of_cores
from megalite.process.launcher import Launch

# Two sockets of four physical cores with two threads each; four GPUs, two at each socket.
NEAR = [frozenset({0, 1, 2, 3, 8, 9, 10, 11})] * 2 + [frozenset({4, 5, 6, 7, 12, 13, 14, 15})] * 2
ALL = frozenset(range(16))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    for core in ALL:
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    for gpu, text in enumerate(["0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"]):
        folder = tmp_path / f"bus/pci/devices/0000:{0x1A + gpu:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(f"{text}\n")
    return tmp_path


def shares(host: Path, rank: int, allowed: frozenset[int]) -> list[int]:
    return sorted(share_of_cores(host, rank, NEAR, allowed) or ())


def test_ranks_share_near_cores_by_physical_cores(host: Path) -> None:
    found = [shares(host, rank, ALL) for rank in range(4)]
    assert found == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]


def test_only_what_the_job_has_is_shared(host: Path) -> None:
    allowed = frozenset({0, 1, 2, 8, 9, 4, 5})
    assert shares(host, 0, allowed) == [0, 8]
    assert shares(host, 1, allowed) == [1, 9]
    assert shares(host, 3, allowed) == [5]


@pytest.mark.parametrize(
    "allowed", [NEAR[0], frozenset({0, 8}), NEAR[2], frozenset({0, 4})], ids=str
)
def test_a_rank_without_a_choice_is_left_alone(host: Path, allowed: frozenset[int]) -> None:
    """Bound already, bound closer, none of the near cores, or fewer of them than ranks."""
    assert shares(host, 0, allowed) == []


def test_a_host_that_says_nothing_is_left_alone(tmp_path: Path) -> None:
    assert share_of_cores(tmp_path, 0, [frozenset()] * 2, ALL) is None
    assert share_of_cores(tmp_path, 1, [frozenset({0, 1})] * 2, ALL) == frozenset({1})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[int]]:
    """Four GPUs on a host of sixteen logical cores; gets the cores that a process is bound to."""
    bound: list[frozenset[int]] = []
    at = [SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A + i, pci_device_id=0) for i in range(4)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: at[index])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(ALL))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    return bound


@pytest.mark.parametrize("source", ["torchrun", "local"])
def test_a_rank_is_bound_near_its_gpu(host: Path, gpus: list[frozenset[int]], source: str) -> None:
    launch = Launch(2, 4, 2, 4, source=source)  # type: ignore[arg-type]
    assert bind_to_gpu(launch, host) == frozenset({4, 5, 12, 13})
    assert gpus == [frozenset({4, 5, 12, 13})]


@pytest.mark.parametrize(
    "launch", [Launch(2, 4, 2, 4, source="slurm"), Launch(2, 8, 2, 8, source="local")], ids=str
)
def test_a_task_of_srun_and_a_host_with_few_gpus_are_left_alone(
    host: Path, gpus: list[frozenset[int]], launch: Launch
) -> None:
    assert bind_to_gpu(launch, host) is None
    assert gpus == []
