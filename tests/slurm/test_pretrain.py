"""launch/pretrain.sbatch on a real Slurm of two nodes: time limit, killed rank, mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.config.text import to_toml
from tests import ROOT
from tests.slurm.kit import Cluster, start, wait_until
from tests.train.kit.runs import GLOBAL_BATCH, lines, make_config, step_numbers, write_tokens

pytestmark = pytest.mark.long

FOREVER = 1_000_000


class Jobs:
    """Submits runs of a tiny model at tp 2 x dp 2: two nodes with two ranks each."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def config(self, name: str, steps: int, **changes: Any) -> Path:
        """A config file whose learning rate does not depend on its end."""
        settings = {"optimizer__lr_schedule": "constant", "parallel__dp": 2, **changes}
        config = make_config(self.folder, name, "tp2", train__steps=steps, **settings)
        path = self.folder / f"{name}.toml"
        path.write_text(to_toml(config))
        return path

    def submit(self, config: Path, *arguments: str) -> str:
        """The number of a new job that trains a config; options of sbatch begin with --."""
        options = [argument for argument in arguments if argument.startswith("--")]
        settings = [argument for argument in arguments if not argument.startswith("--")]
        script = ROOT / "launch/pretrain.sbatch"
        command: list[str | Path] = ["sbatch", "--parsable", "--nodes=2", *options, script]
        return self.cluster.run(*command, config, *settings, cwd=self.folder).strip()

    def set_limit(self, job: str, minutes_left: int) -> None:
        """Let a running job's time end in less than so many whole minutes, and more than one less.

        Slurm looks at limits every 30 seconds; it counts in whole minutes.
        """
        *hours, minutes, _ = self.cluster.show(job)["RunTime"].split(":")
        limit = int(minutes) + 60 * int(hours[-1] if hours else 0) + minutes_left
        self.cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")

    def run_folder(self, name: str) -> Path:
        return self.folder / name

    def log(self, job: str) -> str:
        """What the batch script of a job said."""
        path = self.folder / f"slurm-{job}.out"
        return path.read_text() if path.is_file() else ""

    def node_logs(self, name: str, job: str, attempt: int) -> str:
        folder = self.run_folder(name) / f"slurm-{job}" / f"attempt-{attempt}"
        return "".join(path.read_text() for path in sorted(folder.glob("*.log")))

    def has_done(self, name: str, steps: int) -> bool:
        return any(line["step"] >= steps for line in lines(self.run_folder(name), "step"))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    folder = tmp_path_factory.mktemp("jobs")
    write_tokens(folder / "data", 3 * GLOBAL_BATCH)
    kept = ("HOME", "LANG", "PYTHONPATH", "TMPDIR")
    environ = {name: os.environ[name] for name in kept if name in os.environ}
    environ |= {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "MEGALITE_VENV": "/nonexistent",  # the one of PATH
        "MEGALITE_RANKS_PER_NODE": "2",
        "OMP_NUM_THREADS": "1",
        # both nodes are this machine, whose name may resolve to a loopback address
        "GLOO_SOCKET_IFNAME": "lo",
    }
    # munge wants a short path for its socket
    place = Path(tmp_path_factory.mktemp("s"))
    place.chmod(0o755)
    with start(place, environ) as cluster:
        yield Jobs(cluster, folder)


def ranks_of(jobs: Jobs, name: str) -> list[int]:
    """Pids of the ranks of a run."""
    needle = f"{jobs.folder / name}.toml"
    found = subprocess.run(["pgrep", "-f", rf"bin/megalite train {needle}"], capture_output=True)
    return [int(pid) for pid in found.stdout.split()]


def told(jobs: Jobs, name: str, job: str) -> str:
    logs = "".join(f"\nattempt {n}:\n{jobs.node_logs(name, job, n)}" for n in range(3))
    return f"{jobs.log(job)}\n{logs}"


def go_on(jobs: Jobs, numbers: dict[str, str]) -> dict[str, int]:
    """As soon as each job is requeued: let its run end three steps after the newest checkpoint.

    It gets time enough for that. A requeued job waits a few seconds (cred_expire) before it starts
    and reads its config, so the jobs are watched together: whichever is first must not start before
    its end is written.
    """
    steps: dict[str, int] = {}

    def all_requeued() -> bool:
        for name, job in numbers.items():
            if name not in steps and "requeued" in jobs.log(job):
                steps[name] = max(newest(jobs.run_folder(name)), 0) + 3
                jobs.config(name, steps[name])
                jobs.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")
        return len(steps) == len(numbers)

    wait_until(all_requeued, lambda: "".join(told(jobs, name, numbers[name]) for name in numbers))
    return steps


def newest(run: Path) -> int:
    steps = [int(path.name.split("-")[1]) for path in (run / "checkpoints").glob("step-*")]
    return max(steps, default=-1)


def uninterrupted(jobs: Jobs, steps: int) -> dict[int, Any]:
    """What a run of the same layout, in one go and without Slurm, reports for each step."""
    program = Path(sys.executable).with_name("megalite")
    command: list[str | Path] = [program, "train", jobs.config("straight", steps)]
    done = subprocess.run([*command, "--local"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {numbers[0]: numbers for numbers in step_numbers(jobs.run_folder("straight"))}


def test_runs_go_on_over_a_time_limit_and_over_a_killed_rank(jobs: Jobs) -> None:
    """Two jobs at once on the same two nodes; both resume as if they had never stopped."""
    cut = jobs.submit(jobs.config("cut", FOREVER), "--time=30", "--signal=B:USR1@110")
    killed = jobs.submit(jobs.config("killed", FOREVER, checkpoint__interval=5))
    wait_until(lambda: jobs.has_done("cut", 2), lambda: told(jobs, "cut", cut))
    jobs.set_limit(cut, minutes_left=2)
    wait_until(lambda: jobs.has_done("killed", 7), lambda: told(jobs, "killed", killed))
    os.kill(ranks_of(jobs, "killed")[-1], signal.SIGKILL)

    steps = go_on(jobs, {"cut": cut, "killed": killed})
    assert steps["killed"] > 5, "it goes on from a checkpoint"
    assert "the time limit is near" in jobs.log(cut)
    assert lines(jobs.run_folder("cut"), "end")[0]["exit_code"] == 75
    straight = uninterrupted(jobs, max(steps.values()))

    for name, job in (("killed", killed), ("cut", cut)):
        shown = jobs.cluster.end_of(job)
        assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), told(jobs, name, job)
        done = step_numbers(jobs.run_folder(name))
        assert done[-1][0] == steps[name]
        assert [straight[numbers[0]] for numbers in done] == done
    assert not ranks_of(jobs, "killed"), "nobody is left behind"


def test_mistakes_and_scancel_end_a_job_for_good_and_srun_alone_trains(jobs: Jobs) -> None:
    typo = jobs.submit(jobs.config("typo", 3), "optimizer.lrr=1")
    small: Any = {"parallel__dp": 1}  # for one node
    config = jobs.config("unready", 3, checkpoint__resume="must", **small)
    unready = jobs.submit(config, "--nodes=1")
    cancelled = jobs.submit(jobs.config("cancelled", FOREVER, **small), "--nodes=1")
    # Meanwhile the same verb under srun alone, without torchrun.
    srun = ["srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1"]
    address: Any = {"MASTER_ADDR": "127.0.0.1"}  # nodes of this cluster have no names of their own
    jobs.cluster.run(*srun, "megalite", "train", jobs.config("plain", 2, **small), **address)
    assert step_numbers(jobs.run_folder("plain"))[-1][0] == 2
    wait_until(lambda: jobs.has_done("cancelled", 1), lambda: told(jobs, "cancelled", cancelled))
    jobs.cluster.run("scancel", cancelled)
    shown = jobs.cluster.end_of(cancelled)
    assert (shown["JobState"], shown["Restarts"]) == ("CANCELLED", "0"), jobs.log(cancelled)
    for job in (typo, unready):
        shown = jobs.cluster.end_of(job)
        assert (shown["JobState"], shown["Restarts"]) == ("FAILED", "0"), jobs.log(job)
        assert shown["ExitCode"] == "2:0"
    assert "megalite: stopped: the config has mistakes" in jobs.log(typo)
    assert 'checkpoint.resume="must"' in jobs.log(unready)


def test_local_starts_in_the_shell_of_an_allocation(jobs: Jobs) -> None:
    """Also where salloc starts a step of one task for it, as use_interactive_step has it."""
    small: Any = {"parallel__dp": 1}
    step = ["srun", "--interactive", "--preserve-env", "--ntasks=1"]
    for name, shell in (("shell", []), ("step", step)):
        command = ["salloc", "--ntasks=4", *shell, "megalite", "train"]
        jobs.cluster.run(*command, jobs.config(name, 2, **small), "--local")
        assert step_numbers(jobs.run_folder(name))[-1][0] == 2
