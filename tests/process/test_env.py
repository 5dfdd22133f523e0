"""Launcher variables, devices and rendezvous addresses."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megalite.errors import ConfigError
from megalite.process.env import (
    abort_process,
    check_interface,
    end_process,
    hold_port,
    init_process,
    pick_device,
)
from megalite.process.launcher import (
    Launch,
    device_kind,
    first_host,
    is_first_on_host,
    read_launch,
)

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29411",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "777",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[007-010,12]",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def test_torchrun() -> None:
    assert read_launch(TORCHRUN) == Launch(5, 8, 1, 4, "node1", 29411, "torchrun")
    assert read_launch(TORCHRUN).spans_hosts


def test_torchrun_inside_a_slurm_job_is_torchrun() -> None:
    torchrun = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
    assert read_launch(SLURM | torchrun).source == "torchrun"
    same_place = {"RANK": SLURM["SLURM_PROCID"], "WORLD_SIZE": SLURM["SLURM_NTASKS"]}
    assert read_launch(SLURM | TORCHRUN | same_place).source == "torchrun"


def test_srun_alone() -> None:
    launch = read_launch(SLURM)
    assert (launch.rank, launch.world_size, launch.local_rank) == (5, 6, 1)
    assert launch.local_world_size == 2
    assert launch.master_addr == "gpu007"
    assert launch.source == "slurm"
    assert 1024 <= launch.master_port < 32768


def test_ranks_of_one_slurm_step_meet_and_other_jobs_and_steps_do_not() -> None:
    port = read_launch(SLURM).master_port
    assert read_launch(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master_port == port
    assert read_launch(SLURM | {"SLURM_JOB_ID": "778"}).master_port != port
    assert read_launch(SLURM | {"SLURM_STEP_ID": "1"}).master_port != port


def test_an_address_given_beside_srun_is_used() -> None:
    launch = read_launch(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (launch.master_addr, launch.master_port) == ("10.0.0.1", 4000)


# What Slurm sets in the shell of `salloc -n 4`, and in that of a cluster whose salloc starts
# a step of one task for it (use_interactive_step).
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"}
INTERACTIVE = {
    **SALLOC,
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
        {"MASTER_PORT": "1"},
        {"SLURM_NTASKS": "1"},
        SALLOC,
        SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # of `sbatch -n 4`
        INTERACTIVE,
    ],
)
def test_a_single_process(environ) -> None:
    assert read_launch(environ) == Launch()


def test_torchrun_by_hand_in_the_shell_of_a_slurm_job_is_torchrun() -> None:
    assert read_launch(SALLOC | TORCHRUN).source == "torchrun"
    assert read_launch(INTERACTIVE | TORCHRUN).source == "torchrun"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), r"found RANK=5.* but not WORLD_SIZE"),
        ({"RANK": "0"}, r"found RANK=0 but not LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_RANK": "0"}, r"found LOCAL_RANK=0 but not RANK"),
        (TORCHRUN | {"RANK": "8"}, r"RANK=8 must be below WORLD_SIZE=8"),
        (TORCHRUN | {"RANK": "-1", "WORLD_SIZE": "x"}, r"RANK='-1'.*\nWORLD_SIZE='x'"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, r"local rank 4 of 4"),
        (without(SLURM, "SLURM_NTASKS"), r"found SLURM_PROCID=5.* but not SLURM_NTASKS"),
        (without(SLURM, "SLURM_STEP_NODELIST"), r"not SLURM_STEP_NODELIST"),
        (SLURM | {"SLURM_PROCID": "6"}, r"SLURM_PROCID=6 must be below SLURM_NTASKS=6"),
        (without(SLURM, "SLURM_STEP_ID"), r"found SLURM_PROCID=5.* but not SLURM_STEP_ID"),
        (SLURM | {"SLURM_JOB_ID": ""}, r"SLURM_JOB_ID=''"),
        (SLURM | TORCHRUN, r"RANK=5 of WORLD_SIZE=8, which torchrun .* SLURM_NTASKS=6; unset"),
    ],
)
def test_left_over_or_contradictory_variables_are_refused(environ, message) -> None:
    with pytest.raises(ConfigError, match=message):
        read_launch(environ)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[007-010,12],login1", "gpu007"),
        ("gpu[3,5-7]-ib", "gpu3-ib"),
        ("node1,node2", "node1"),
        ("a.b-c", "a.b-c"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_a_node_list_that_names_no_host() -> None:
    with pytest.raises(ConfigError, match=r"node list ''"):
        first_host("")


def test_cuda_needs_a_gpu_for_each_process_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    here = Launch(rank=1, world_size=2, local_rank=1, local_world_size=2)
    assert pick_device(here) == torch.device("cuda", 1)
    assert pick_device(here, "cpu") == torch.device("cpu")
    with pytest.raises(
        ConfigError, match=r"4 processes on host .* has 2; start at most 2 processes a host, or add"
    ):
        pick_device(Launch(world_size=4, local_world_size=4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(here) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"2 processes on host .* but it has 0; add --device cpu"):
        pick_device(here, "cuda")


def test_a_task_of_slurm_takes_the_one_gpu_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """--gpus-per-task and --gpu-bind show each task its own GPU alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    task = Launch(rank=3, world_size=8, local_rank=3, local_world_size=8, source="slurm")
    assert pick_device(task) == torch.device("cuda", 0)
    assert pick_device(task, "cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"8 processes .* has 1; .* or add --device cpu"):
        pick_device(replace(task, source="torchrun"))


def test_kinds_of_devices_are_named_in_the_refusal() -> None:
    assert [device_kind(kind) for kind in ("auto", "cpu", "cuda")] == ["auto", "cpu", "cuda"]
    with pytest.raises(ConfigError, match="--device=tpu: use auto or cpu or cuda"):
        device_kind("tpu")


def test_a_loopback_host_name_is_refused_with_the_setting_that_helps() -> None:
    with pytest.raises(ConfigError, match=r"'localhost' resolves to 127\..*GLOO_SOCKET_IFNAME"):
        check_interface({}, "localhost")
    with pytest.raises(ConfigError, match=r"does not resolve.*GLOO_SOCKET_IFNAME"):
        check_interface({}, "no-such-host.invalid")
    check_interface({"GLOO_SOCKET_IFNAME": "eth0"}, "localhost")
    check_interface({}, "192.0.2.7")


def test_a_held_port_is_nobody_elses() -> None:
    with hold_port() as first, hold_port() as second, socket.socket() as third:
        assert first.getsockname()[1] != second.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            third.bind(first.getsockname())


def test_a_single_process_can_join_itself_and_leave() -> None:
    init_process(Launch(), torch.device("cpu"), 10.0)
    try:
        assert dist.get_world_size() == 1
    finally:
        end_process()
    assert not dist.is_initialized()
    end_process()


class Group:
    """Takes the place of NCCL's group: counts its ends, each of which takes `takes_s`."""

    def __init__(self, patch: pytest.MonkeyPatch, backend: str, takes_s: float = 0.0) -> None:
        self.num_aborts, self._takes_s = 0, takes_s
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_backend", lambda: backend)
        # Raises where torch has none of the name.
        patch.setattr(dist.distributed_c10d, "_abort_process_group", self._abort)

    def _abort(self) -> None:
        self.num_aborts += 1
        time.sleep(self._takes_s)
        raise RuntimeError("a communicator is gone")


@pytest.mark.parametrize(("backend", "num_aborts"), [("nccl", 1), ("gloo", 0)])
def test_a_failed_rank_aborts_what_would_block(
    monkeypatch: pytest.MonkeyPatch, backend: str, num_aborts: int
) -> None:
    group = Group(monkeypatch, backend)
    abort_process()
    assert group.num_aborts == num_aborts


def test_an_abort_that_blocks_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, "nccl", takes_s=3600.0)
    abort_process(0.05)
    assert group.num_aborts == 1


@pytest.mark.long
def test_who_cannot_join_says_where() -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
    launch = Launch(rank=1, world_size=2, local_rank=1, local_world_size=2, master_port=port)
    with pytest.raises(RuntimeError, match=r"connect|store|timed out") as caught:
        init_process(launch, torch.device("cpu"), 0.5)
    assert f"rank 1 of 2 (single) could not join the others at 127.0.0.1:{port}" in str(
        caught.value.__notes__
    )


@pytest.mark.long
def test_who_waits_in_vain_names_the_ranks_that_did_not_come() -> None:
    listener = hold_port()
    port = listener.getsockname()[1]
    launch = Launch(rank=0, world_size=3, local_world_size=3, master_port=port)
    with pytest.raises(RuntimeError) as caught:
        init_process(launch, torch.device("cpu"), 0.5, listener=listener)
    assert "did not come: rank 1, 2" in caught.value.__notes__


def test_the_first_process_of_a_host_is_known() -> None:
    assert is_first_on_host({})
    ranks = [TORCHRUN | {"LOCAL_RANK": str(n)} for n in range(3)]
    assert [is_first_on_host(rank) for rank in ranks] == [True, False, False]
    assert not is_first_on_host(SLURM)
    assert is_first_on_host(SLURM | {"SLURM_LOCALID": "0"})
    assert is_first_on_host({"SLURM_LOCALID": "1", "SLURM_NTASKS": "1"})


@pytest.mark.parametrize("environ", [{"LOCAL_RANK": "1"}, TORCHRUN | {"LOCAL_RANK": "x"}])
def test_a_place_that_cannot_be_read_silences_nobody(environ) -> None:
    assert is_first_on_host(environ)
