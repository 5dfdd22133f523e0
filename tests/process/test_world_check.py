"""Ranks that do not fit together end at the start, with their hosts named."""

from __future__ import annotations

import multiprocessing
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from megalite.distributed.agree import PeerFailedError
from megalite.errors import ConfigError
from megalite.process import world_check
from megalite.process.env import hold_port, init_process
from megalite.process.launcher import Launch
from megalite.process.world_check import own_traits, require_same_traits

GPU = {"device": "cuda", "torch": "2.13.0", "NCCL": "2.30.4"}
CPU = {"device": "cpu", "torch": "2.13.0"}


def compared(traits: list[dict[str, str]]) -> list[Exception | None]:
    """What each rank raises."""
    store = HashStore()

    def rank(number: int) -> Exception | None:
        try:
            require_same_traits(store, number, len(traits), traits[number], 60.0)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(len(traits)) as pool:
        return list(pool.map(rank, range(len(traits))))


def test_equal_ranks_go_on() -> None:
    assert compared([GPU, GPU, GPU]) == [None] * 3


def test_a_host_without_gpus_ends_all_ranks_and_one_of_them_says_so() -> None:
    errors = compared([GPU, CPU, GPU])
    host = socket.gethostname()
    text = (
        f"the ranks differ in device: cuda on 2 ranks ({host}); cpu on 1 rank ({host}); leave out "
        "the hosts without GPUs, or start all ranks with --device cpu"
    )
    assert [str(error) for error in errors] == [text] * 3
    assert [type(error) for error in errors] == [ConfigError, PeerFailedError, PeerFailedError]


def test_other_software_is_named_in_a_line_each() -> None:
    error = compared([GPU, GPU | {"torch": "2.12.1", "NCCL": "2.29.3"}])[0]
    assert isinstance(error, ConfigError)
    torches, nccls = error.problems
    assert "differ in torch: 2.13.0 on 1 rank " in torches
    assert torches.endswith("; install the same version on all hosts")
    assert "differ in NCCL: 2.30.4 on 1 rank " in nccls


def test_many_hosts_are_counted() -> None:
    ranks = [(f"gpu{number // 2}", GPU) for number in range(16)] + [("cpu0", CPU)]
    (line,) = world_check._differences(ranks)
    assert (
        "cuda on 16 ranks (gpu0, gpu1, gpu2, gpu3 and 4 more hosts); cpu on 1 rank (cpu0)" in line
    )


def test_own_traits() -> None:
    traits = own_traits(torch.device("cpu"))
    assert traits["device"] == "cpu"
    assert traits["torch"] == torch.__version__
    assert set(traits) == {"device", "torch", "triton", "megalite"}


def joins(launch: Launch, listener: Any, traits: dict[str, str], pipe: Any) -> None:
    try:
        with patch("megalite.process.env.own_traits", lambda device: traits):
            init_process(launch, torch.device("cpu"), 60.0, listener=listener)
    except Exception as error:
        pipe.send((type(error).__name__, str(error)))
    else:
        pipe.send(("joined", ""))


@pytest.mark.long
def test_processes_that_differ_do_not_join() -> None:
    """Rank 0, which serves the store, ends after the others have read why."""
    listener = hold_port()
    fork = multiprocessing.get_context("fork")
    ends = []
    processes = []
    for rank in range(2):
        launch = Launch(rank, 2, rank, 2, master_port=listener.getsockname()[1], source="local")
        reader, writer = fork.Pipe(duplex=False)
        traits = GPU if rank == 0 else CPU
        process = fork.Process(target=joins, args=(launch, listener, traits, writer))
        process.start()
        ends.append(reader)
        processes.append(process)
    found = []
    for reader in ends:
        assert reader.poll(60)
        found.append(reader.recv())
    for process in processes:
        process.join()
    assert [kind for kind, _ in found] == ["ConfigError", "PeerFailedError"]
    assert found[0][1] == found[1][1]
    assert "differ in device" in found[0][1]
