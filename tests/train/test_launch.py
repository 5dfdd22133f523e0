"""`megalite train` as processes: signals, deaths, errors, launchers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from typer.testing import CliRunner

from megalite.cli.main import app
from megalite.config.text import to_toml
from megalite.process.watch import BEAT_S
from tests import ROOT
from tests.train.kit.runs import (
    GLOBAL_BATCH,
    checkpoint_tensors,
    different,
    lines,
    make_config,
    step_numbers,
    write_tokens,
)

pytestmark = pytest.mark.long

FOREVER = 1_000_000
TOLD = "{}: saves at the end of the step and leaves; again: ends at once\n"


def wait_until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert time.monotonic() < deadline, "nothing came for two minutes"
        time.sleep(0.01)


class Job:
    """A running `megalite train`."""

    def __init__(self, server: subprocess.Popen[str], folder: Path, order: dict[str, Any]) -> None:
        self._server, self.folder = server, folder
        self.pid = int(self._ask(order))

    def _ask(self, message: object) -> str:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(message) + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()

    def code(self) -> int:
        """Its exit code, once it has ended; one that does not end in two minutes is killed."""
        killer = Timer(120, self._kill)
        killer.start()
        try:
            return int(self._ask(self.pid))
        finally:
            killer.cancel()

    def _kill(self) -> None:
        for pid in [*self.ranks(), self.pid]:
            os.kill(pid, signal.SIGKILL)

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def ranks(self) -> list[int]:
        """Pids of its ranks, in order."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


class Runs:
    """Starts jobs on runs that lie in one folder."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server, self.folder, self._count = server, folder, 0

    def config(self, name: str, **changes: Any) -> Path:
        """A config file of two processes (tp 2) whose learning rate does not depend on its end."""
        changes = {"optimizer__lr_schedule": "constant", "train__steps": 3, **changes}
        path = self.folder / f"{name}.toml"
        path.write_text(to_toml(make_config(self.folder, name, "tp2", **changes)))
        return path

    def start(
        self,
        config: Path,
        *arguments: str,
        fault: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> Job:
        """`megalite train CONFIG ARGUMENTS`; `--local` unless there is an environment."""
        self._count += 1
        folder = self.folder / f"job-{self._count}"
        folder.mkdir()
        local = [] if environment else ["--local"]
        order = {
            "arguments": ["train", str(config), *local, *arguments],
            "folder": str(folder),
            "fault": fault,
            "environment": environment or {},
        }
        return Job(self._server, folder, order)


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.train.kit.cli_server"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def runs(server: subprocess.Popen[str], tmp_path: Path) -> Runs:
    write_tokens(tmp_path / "data", 3 * GLOBAL_BATCH)
    return Runs(server, tmp_path)


def has_done(run: Path, steps: int) -> bool:
    return any(line["step"] >= steps for line in lines(run, "step"))


def has_been_watched(run: Path) -> bool:
    """Steps took so long that every rank has posted its place since it began to train."""
    return sum(line["step_time_s"] for line in lines(run, "step")) > 2.5 * BEAT_S


def test_signals_save_on_all_ranks_and_the_run_goes_on_as_if_never_stopped(runs: Runs) -> None:
    run, config = runs.folder / "run", runs.config("run", train__steps=FOREVER)
    job = runs.start(config)
    wait_until(lambda: has_done(run, 2))
    os.kill(job.ranks()[1], signal.SIGUSR1)
    assert job.code() == 75, job.err
    first = lines(run, "end")[-1]["step"]

    job = runs.start(config)
    wait_until(lambda: has_done(run, first + 2))
    os.kill(job.pid, signal.SIGTERM)
    assert job.code() == 75, job.err
    assert lines(run, "end")[-1]["reason"] == "SIGTERM"
    second = lines(run, "end")[-1]["step"]
    assert f"resumed from {run / 'checkpoints' / f'step-{first:08d}'} at step {first}\n" in job.out

    steps = second + 2
    jobs = [
        runs.start(config, f"train.steps={steps}"),
        runs.start(runs.config("straight", train__steps=steps)),
    ]
    assert [job.code() for job in jobs] == [0, 0], [job.err for job in jobs]
    straight = runs.folder / "straight"
    saved = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert saved == [f"step-{step:08d}" for step in (first, second, steps)]
    assert step_numbers(run) == step_numbers(straight)
    assert different(checkpoint_tensors(run, steps), checkpoint_tensors(straight, steps)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_hangup_save_and_say_how_to_go_on(runs: Runs, number: signal.Signals) -> None:
    run = runs.folder / "run"
    job = runs.start(runs.config("run", train__steps=FOREVER))
    wait_until(lambda: has_done(run, 2))
    os.kill(job.pid, number)
    assert job.code() == 75, job.err
    end = lines(run, "end")[-1]
    assert (end["reason"], end["exit_code"]) == (number.name, 75)
    assert (run / "checkpoints" / f"step-{end['step']:08d}").is_dir()
    assert job.err == TOLD.format(number.name)
    step = f"{number.name} at step {end['step']} of {FOREVER}"
    assert job.out.endswith(f"\n{step}; the same command goes on from there\n")


def test_a_hangup_that_is_ignored_at_the_start_ends_nothing(runs: Runs) -> None:
    run = runs.folder / "run"
    job = runs.start(runs.config("run", train__steps=FOREVER), fault="ignores_hangups")
    wait_until(lambda: has_done(run, 1))
    for pid in (job.pid, *job.ranks()):
        os.kill(pid, signal.SIGHUP)
    done = lines(run, "step")[-1]["step"]
    wait_until(lambda: has_done(run, done + 3))
    os.kill(job.pid, signal.SIGTERM)
    assert job.code() == 75, job.err
    assert lines(run, "end")[-1]["reason"] == "SIGTERM"


def test_a_second_signal_ends_the_ranks_at_once_even_stopped_ones(runs: Runs) -> None:
    run = runs.folder / "run"
    job = runs.start(runs.config("run", train__steps=FOREVER))
    wait_until(lambda: has_done(run, 2))
    ranks = job.ranks()
    os.kill(ranks[1], signal.SIGSTOP)
    os.kill(job.pid, signal.SIGINT)
    wait_until(lambda: job.err != "")
    os.kill(job.pid, signal.SIGTERM)
    assert job.code() == 143
    assert job.err == TOLD.format("SIGINT") + "SIGTERM again: ends at once, without saving\n"
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert not (run / "checkpoints").exists()


def test_a_local_run_with_a_stopped_rank_is_left_when_asked(runs: Runs) -> None:
    run = runs.folder / "run"
    job = runs.start(runs.config("run", train__steps=FOREVER), fault="leaves_soon")
    wait_until(partial(has_been_watched, run))
    ranks = job.ranks()
    os.kill(ranks[1], signal.SIGSTOP)
    os.kill(job.pid, signal.SIGTERM)
    assert job.code() == 1
    assert "rank 1 gives no sign of life, it is dead or stopped; last seen at: " in job.err
    assert "asked to leave and stuck for " in job.err
    assert "rank 0 of 2 ended with code 1\nthen rank 1: ended by the launcher\n" in job.err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_killed_rank_ends_the_job_with_a_message(runs: Runs) -> None:
    job = runs.start(runs.config("run", train__steps=FOREVER))
    wait_until(lambda: has_done(runs.folder / "run", 2))
    ranks = job.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    assert job.code() == 128 + signal.SIGKILL
    assert job.err.startswith("rank 1 of 2 was ended by signal 9 (SIGKILL)\n")
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_rank_that_raises_shows_its_own_traceback_first(runs: Runs) -> None:
    job = runs.start(runs.config("run"), fault="raises")
    assert job.code() == 1
    assert job.err.startswith("rank 1 of 2 failed:\nTraceback (most recent call last):\n")
    assert job.err.count("Traceback") == 1
    assert "\nValueError: the cause\n" in job.err
    assert [line["step"] for line in lines(runs.folder / "run", "step")] == [1]


def test_an_error_in_a_forward_is_not_put_down_to_those_who_wait_for_it(runs: Runs) -> None:
    """Though the pipeline notes on it where it was."""
    job = runs.start(runs.config("run"), fault="raises_in_a_forward")
    assert job.code() == 1
    assert job.err.startswith("rank 1 of 2 failed:\nTraceback (most recent call last):\n")
    assert "\nValueError: the cause\npipeline rank 0 of 1, action 1 of " in job.err
    assert "furthest behind" not in job.err
    assert "waiting in" not in job.err.partition("\nthen rank")[0]


def test_errors_to_fix_are_lines_without_a_traceback(runs: Runs) -> None:
    jobs = [
        runs.start(runs.config("missing"), "checkpoint.resume='must'"),
        runs.start(runs.config("spoilt"), fault="spoils_a_gradient"),
    ]
    assert [job.code() for job in jobs] == [2, 2]
    missing, spoilt = (job.err for job in jobs)
    assert missing == (
        'error: checkpoint.resume="must", but '
        f"{runs.folder / 'missing' / 'checkpoints'} holds no checkpoint; "
        "check name and out, or set checkpoint.resume to auto\n"
    )
    assert spoilt.startswith("error: step 2: gradients of update 2 are not finite: ")
    assert "Traceback" not in spoilt
    assert [line["exit_code"] for line in lines(runs.folder / "spoilt", "end")] == [2]


def test_two_jobs_at_once_on_one_host_both_train(runs: Runs) -> None:
    jobs = [runs.start(runs.config(name)) for name in ("one", "two")]
    assert [job.code() for job in jobs] == [0, 0], [job.err for job in jobs]
    assert step_numbers(runs.folder / "one") == step_numbers(runs.folder / "two")
    shown = [
        line for line in jobs[0].out.splitlines() if line.startswith("step ") and "loss" in line
    ]
    assert [line.split("  loss")[0] for line in shown] == [f"step     {n}/3" for n in (1, 2, 3)]
    assert jobs[0].err == ""


def test_torchrun_starts_the_same_run(runs: Runs) -> None:
    job = runs.start(runs.config("local"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = Path(sys.executable).parent / "megalite"
    done = subprocess.run(
        [sys.executable, *torchrun, command, "train", runs.config("torchrun")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert job.code() == 0, job.err
    assert step_numbers(runs.folder / "torchrun") == step_numbers(runs.folder / "local")


def test_ctrl_c_at_torchrun_saves_on_all_ranks(runs: Runs) -> None:
    run, config = runs.folder / "run", runs.config("run", train__steps=FOREVER)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    agent = subprocess.Popen(
        [sys.executable, *torchrun, Path(sys.executable).parent / "megalite", "train", config],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wait_until(lambda: has_done(run, 2))
    agent.send_signal(signal.SIGINT)
    _, err = agent.communicate(timeout=120)
    assert err.count(TOLD.format("SIGINT")) == 1
    end = lines(run, "end")[-1]
    assert (end["reason"], end["exit_code"]) == ("SIGINT", 75)
    assert (run / "checkpoints" / f"step-{end['step']:08d}").is_dir()


def launched(
    runs: Runs,
    config: Path,
    *arguments: str,
    fault: str | None = None,
    ranks: Sequence[int] = (0, 1),
) -> list[Job]:
    """Those of two processes with the variables that torchrun would set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        runs.start(
            config,
            *arguments,
            fault=fault,
            environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in ranks
    ]


def test_a_failed_rank_of_a_launcher_ends_at_once_and_says_who_it_is(runs: Runs) -> None:
    jobs = launched(runs, runs.config("run"), fault="raises")
    assert [job.code() for job in jobs] == [1, 1]
    assert jobs[1].err.startswith("rank 1 of 2 failed:\nTraceback")
    assert jobs[1].err.endswith("ValueError: the cause\n")
    assert jobs[0].err.startswith("rank 0 of 2 failed:\nTraceback")
    assert "\nrank 1 failed (ValueError: the cause); it was at: rank 1 (tp 1): " in jobs[0].err


def test_an_error_that_all_ranks_share_is_told_once(runs: Runs) -> None:
    early = launched(runs, runs.config("missing"), "checkpoint.resume='must'")
    (runs.folder / "spoilt" / "checkpoints" / "step-00000001").mkdir(parents=True)
    shared = launched(runs, runs.config("spoilt"), "checkpoint.resume='must'")
    alone = launched(runs, runs.config("unread"), fault="cannot_open")
    for jobs in (early, shared, alone):
        assert [job.code() for job in jobs] == [2, 2]
    assert early[0].err.startswith('error: checkpoint.resume="must", but ')
    assert early[1].err == ""
    told = [job.err for job in shared if job.err]
    assert len(told) == 1
    assert re.match(r"\[rank [01]\] error: no checkpoint in .* is ", told[0])
    assert [job.err for job in alone] == ["", "[rank 1] error: data.path=here: no such file\n"]


def test_a_killed_and_a_stopped_rank_are_named_with_their_place(runs: Runs) -> None:
    killed = launched(runs, runs.config("killed", train__steps=FOREVER, train__timeout_s=60))
    stopped = launched(runs, runs.config("stopped", train__steps=FOREVER, train__timeout_s=20))
    for name, jobs, number in (
        ("killed", killed, signal.SIGKILL),
        ("stopped", stopped, signal.SIGSTOP),
    ):
        wait_until(partial(has_been_watched, runs.folder / name))
        os.kill(jobs[1].pid, number)
    try:
        assert [killed[0].code(), stopped[0].code()] == [1, 1]
    finally:
        os.kill(stopped[1].pid, signal.SIGKILL)
    assert [killed[1].code(), stopped[1].code()] == [-signal.SIGKILL] * 2
    sign = "rank 1 gives no sign of life, it is dead or stopped; last seen at: rank 1 (tp 1): "
    for err in (killed[0].err, stopped[0].err):
        line = next(line for line in err.splitlines() if line.startswith(sign))
        assert re.search(r"op #\d+, step \d+, phase '\w+", line)
    assert stopped[0].err.startswith("nothing new for 10 s: rank 0 (tp 0): ")


def catches(pid: int, number: int) -> bool:
    """True if the process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
    assert caught is not None
    return bool(int(caught[1], 16) & (1 << (number - 1)))


def test_a_rank_that_is_blocked_leaves_when_asked_and_says_what_it_waited_in(runs: Runs) -> None:
    """In a collective, its peer stopped, and in a rendezvous to which the other rank never comes.

    Both have ten minutes until a timeout would end them.
    """
    config = runs.config("stopped", train__steps=FOREVER)
    stopped = launched(runs, config, fault="leaves_soon")
    alone = launched(runs, runs.config("alone"), fault="leaves_soon", ranks=[0])[0]
    try:
        wait_until(lambda: catches(alone.pid, signal.SIGTERM))
        os.kill(alone.pid, signal.SIGTERM)
        wait_until(partial(has_been_watched, runs.folder / "stopped"))
        os.kill(stopped[1].pid, signal.SIGSTOP)
        os.kill(stopped[0].pid, signal.SIGTERM)
        assert [stopped[0].code(), alone.code()] == [1, 1]
    finally:
        os.kill(stopped[1].pid, signal.SIGKILL)
    assert stopped[1].code() == -signal.SIGKILL
    assert alone.err.startswith(TOLD.format("SIGTERM"))
    leaves = r"SIGTERM: leaves after 3 s without the other ranks, at the rendezvous 127.0.0.1:\d+\n"
    assert re.search(leaves, alone.err)
    told, gone, stuck = stopped[0].err.splitlines()
    assert told + "\n" == TOLD.format("SIGTERM")
    assert gone.startswith("rank 1 gives no sign of life, it is dead or stopped; last seen at: ")
    place = r"rank 0 \(tp 0\): waiting in \w+ on \w+, op #\d+, step \d+, phase '"
    assert re.match(rf"asked to leave and stuck for \d+ s: {place}", stuck)


def test_a_second_signal_ends_a_blocked_rank_of_a_launcher_at_once(runs: Runs) -> None:
    jobs = launched(runs, runs.config("run", train__steps=FOREVER))
    wait_until(lambda: has_done(runs.folder / "run", 2))
    os.kill(jobs[1].pid, signal.SIGSTOP)
    try:
        os.kill(jobs[0].pid, signal.SIGTERM)
        wait_until(lambda: jobs[0].err != "")
        os.kill(jobs[0].pid, signal.SIGINT)
        assert jobs[0].code() == 130
    finally:
        os.kill(jobs[1].pid, signal.SIGKILL)
    assert jobs[1].code() == -signal.SIGKILL
    told = TOLD.format("SIGTERM") + "SIGINT again: ends at once, without saving\n"
    assert jobs[0].err == told


@pytest.mark.parametrize("fault", ["signalled_before_the_ranks", "signalled_while_a_rank_starts"])
def test_a_signal_during_start_up_saves_the_first_step(runs: Runs, fault: str) -> None:
    job = runs.start(runs.config("run", train__steps=FOREVER), fault=fault)
    assert job.code() == 75, job.err
    assert lines(runs.folder / "run", "end")[-1]["step"] == 1
    assert (runs.folder / "run" / "checkpoints" / "step-00000001").is_dir()
    assert job.err == (TOLD.format("SIGUSR1") if fault == "signalled_before_the_ranks" else "")


def test_a_late_signal_does_not_change_the_code(runs: Runs) -> None:
    job = runs.start(runs.config("run"), fault="terminated_late")
    assert job.code() == 0
    assert job.err in ("", TOLD.format("SIGTERM"))


@pytest.mark.parametrize("local", [[], ["--local"]])
def test_left_over_launcher_variables_are_refused(runs: Runs, local: list[str]) -> None:
    result = CliRunner().invoke(
        app, ["train", str(runs.config("run")), *local], env={"RANK": "0", "WORLD_SIZE": None}
    )
    assert result.exit_code == 2
    assert result.stderr.startswith("error: found RANK=0 but not LOCAL_RANK, WORLD_SIZE, ")
    assert "unset the left-over variables" in result.stderr


LEFT_OVER = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (LEFT_OVER, "error: --local starts its own processes, but torchrun already started this "),
        (LEFT_OVER | {"MASTER_PORT": None}, "error: found RANK=1, LOCAL_RANK=1, WORLD_SIZE=2, "),
    ],
)
def test_a_left_over_place_does_not_silence_the_refusal(
    runs: Runs, environ: dict[str, str | None], message: str
) -> None:
    result = CliRunner().invoke(app, ["train", str(runs.config("run")), "--local"], env=environ)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)


@pytest.mark.parametrize("verb", [["report", "nowhere"], ["generate", "nowhere"]])
def test_a_left_over_place_silences_no_other_verb(verb: list[str]) -> None:
    result = CliRunner().invoke(app, verb, env=dict(LEFT_OVER))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_a_layout_for_more_processes_than_there_are_is_refused(runs: Runs) -> None:
    result = CliRunner().invoke(app, ["train", str(runs.config("run", parallel__dp=1))])
    assert result.exit_code == 2
    needs = (
        "parallel.tp=2 x parallel.pp=1 x parallel.dp=1 needs 2 processes, this is 1; add --local"
    )
    assert needs in result.stderr
    assert not (runs.folder / "run").exists()


REFUSALS: dict[str, tuple[list[str], dict[str, str], str]] = {
    "a part of torchrun's variables": ([], {"RANK": "0"}, "found RANK=0 but not LOCAL_RANK, "),
    "another world": ([], {}, "parallel.dp=1 needs 2 processes, this is 1; add "),
    "no checkpoint": (["--local", "checkpoint.resume='must'"], {}, "holds no checkpoint; check "),
    "no data": (["--local", "data.path=nowhere"], {}, "no file nowhere.bin nor nowhere.idx below "),
    "no effect": (["--local", "data.prefetch=3"], {}, "data.prefetch=3 has no effect: "),
    "no schedule": (
        ["--local", "pipeline.schedule='file:no.csv'"],
        {},
        "pipeline.schedule: no.csv: cannot be read: no such file below ",
    ),
}


def test_what_cannot_start_is_refused_before_torch_is_imported(runs: Runs) -> None:
    """And so before there is a process group. One process answers all, one after another."""
    config = str(runs.config("run", parallel__dp=1, data__workers=0))
    code = f"""
import json, os, sys
from megalite.cli.main import main
for arguments, environment, _ in {list(REFUSALS.values())!r}:
    sys.argv = ["megalite", "train", {config!r}, *arguments]
    os.environ.update(environment)
    try:
        main()
    except SystemExit as stop:
        print(stop.code, "torch" in sys.modules)
    for name in environment:
        del os.environ[name]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2 False"] * len(REFUSALS), done.stderr
    for line, (_, _, message) in zip(done.stderr.splitlines(), REFUSALS.values(), strict=True):
        assert line.startswith("error: ")
        assert message in line
