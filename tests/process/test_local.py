"""The local launcher, from outside: exit codes, messages, signals, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megalite.errors import ConfigError
from megalite.process import local
from megalite.process.local import run_local

SERVER = Path(__file__).with_name("kit.py")


class Job:
    """One launcher of two ranks, running."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self._folder = folder

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text()

    def lines(self, count: int) -> list[str]:
        """The first `count` lines of output, once they are there."""
        wait_until(lambda: (self._folder / "out").exists() and self.out.count("\n") >= count)
        return self.out.splitlines()[:count]

    def code(self) -> int:
        """The exit code, once there is one."""
        path = self._folder / "code"
        wait_until(path.exists)
        return int(path.read_text())


def wait_until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert time.monotonic() < deadline, "nothing came for two minutes"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Callable[..., Job]]:
    """`start(scenario, method)`: a job from a process that has torch imported already."""
    server = subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    requests, answers = server.stdin, server.stdout

    def begin(scenario: str, method: str = "fork") -> Job:
        folder = tmp_path_factory.mktemp(scenario)
        requests.write(f"{scenario} {method} {folder}\n")
        requests.flush()
        return Job(int(answers.readline()), folder)

    yield begin
    requests.close()
    answers.close()
    server.wait()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def trained(job: Job) -> bool:
    return job.code() == 0 and sorted(job.out.splitlines()) == [
        "hello rank 0 sum 3 threads 1",
        "hello rank 1 sum 3 threads 1",
    ]


@pytest.mark.long
def test_jobs_at_once_on_one_host_all_train(start) -> None:
    jobs = [start("trains") for _ in range(3)]
    assert [trained(job) for job in jobs] == [True] * 3, [job.err for job in jobs]


@pytest.mark.slow
def test_spawned_ranks_train_too(start) -> None:
    assert trained(start("trains", "spawn"))


@pytest.mark.long
def test_failures_come_back_as_codes_and_the_first_cause_is_told_once(start) -> None:
    names = ("raises", "is_killed", "is_misconfigured", "returns_a_code")
    jobs = {name: start(name) for name in names}
    assert {name: job.code() for name, job in jobs.items()} == {
        "raises": 1,
        "is_killed": 128 + signal.SIGKILL,
        "is_misconfigured": 2,
        "returns_a_code": 75,
    }
    raised = jobs["raises"].err
    first, second, *_ = raised.splitlines()
    assert first == "rank 1 of 2 failed:"
    assert second == "Traceback (most recent call last):"
    assert raised.count("Traceback") == 1
    assert raised.count("ValueError: the cause hello") == 1
    assert "rank 1 of 2 was ended by signal 9 (SIGKILL)" in jobs["is_killed"].err
    assert "then rank 0: ended by the launcher" in jobs["is_killed"].err
    assert "parallel.tp=3 does not fit" in jobs["is_misconfigured"].err
    assert jobs["returns_a_code"].err == ""


def test_signals_to_the_launcher_reach_every_rank(start) -> None:
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    jobs = [start("waits_for_a_signal") for _ in numbers]
    for job, number in zip(jobs, numbers, strict=True):
        assert job.lines(1) == ["ready"]
        os.kill(job.pid, number)
    assert [job.code() for job in jobs] == [10 + number for number in numbers]


def pids_of_ranks(job: Job) -> list[int]:
    return [int(line.split()[1]) for line in job.lines(2)]


def test_ranks_do_not_outlive_a_killed_launcher(start) -> None:
    job = start("sleeps")
    pids = pids_of_ranks(job)
    assert not any(is_gone(pid) for pid in pids)
    os.kill(job.pid, signal.SIGKILL)
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_a_terminated_launcher_ends_ranks_that_have_no_handler(start) -> None:
    job = start("sleeps")
    pids = pids_of_ranks(job)
    os.kill(job.pid, signal.SIGTERM)
    assert job.code() == 128 + signal.SIGTERM
    assert job.err == ""
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("gpus", "kind", "said"),
    [
        (0, "cpu", ""),
        (1, "cpu", "2 processes and 1 GPU here: they run on the CPU\n"),
        (2, "cuda", ""),
        (8, "cuda", ""),
    ],
)
def test_auto_takes_gpus_if_there_is_one_for_each_rank(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: int,
    kind: str,
    said: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    started: list[str] = []
    monkeypatch.setattr(local, "_start_method", started.append)
    monkeypatch.setattr(local, "_launches", lambda *_: [])  # no rank is started
    assert run_local(print, 2) == 0
    assert run_local(print, 2, device="cuda") == 0
    assert started == [kind, "cuda"]
    assert capsys.readouterr().out == said


def test_an_empty_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="world size 0"):
        run_local(print, 0)
