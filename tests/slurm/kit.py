"""A Slurm of two nodes on this machine: its own munge, controller and two slurmd, in one folder.

Needs Debian's `slurm-wlm` and `munge`; no systemd, no root. Everything is started in the foreground
and ended by pid.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

# cred_expire: how long a requeued job waits before it starts again.
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmctldPidFile={folder}/slurmctld.pid
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MailProg=/bin/true
KillWait=2
JobRequeue=1
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 State=UNKNOWN
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""
_CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint={folder}/cgroup
"""


def wait_until(
    there: Callable[[], bool], what: str | Callable[[], str], seconds: float = 300.0
) -> None:
    """Return when `there()`; after `seconds` fail, and say what was waited for."""
    deadline = time.monotonic() + seconds
    while not there():
        if time.monotonic() > deadline:
            shown = what if isinstance(what, str) else what()
            raise AssertionError(f"nothing came for {seconds:g} s: {shown}")
        time.sleep(0.1)


class Cluster:
    """A running Slurm; `environ` is what its commands, and the jobs, see."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.environ = {**environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str | Path, cwd: Path | None = None, **variables: str) -> str:
        """Output of a command that must succeed; `variables` are added to its environment."""
        done = subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=self.environ | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def end_of(self, job: str) -> dict[str, str]:
        """What became of a job, once it has ended for good."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        wait_until(lambda: self.show(job)["JobState"] in ended, f"the end of job {job}")
        return self.show(job)


@contextlib.contextmanager
def start(folder: Path, environ: dict[str, str]) -> Iterator[Cluster]:
    """A cluster while the context lasts; its jobs are cancelled and its daemons ended after it."""
    environ = {**environ, "PATH": f"{environ['PATH']}:/usr/sbin:/sbin"}
    missing = [tool for tool in TOOLS if shutil.which(tool, path=environ["PATH"]) is None]
    assert not missing, (
        f"{', '.join(missing)} not found: these tests need a Slurm to start; "
        "apt-get install slurm-wlm munge (.ci/run does)"
    )
    _write_settings(folder)
    cluster = Cluster(folder, environ)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(_munged(cluster))
        wait_until((folder / "munge.sock").exists, f"munged, see {folder / 'munged.out'}", 60)
        daemons.append(_daemon(cluster, "slurmctld", "slurmctld", "-D"))
        for node in ("node1", "node2"):
            daemons.append(_daemon(cluster, node, "slurmd", "-D", "-N", node))
        wait_until(lambda: _idle_nodes(cluster) == 2, f"two idle nodes, see {folder}/*.out", 60)
        yield cluster
    finally:
        _end(cluster, daemons)


def _write_settings(folder: Path) -> None:
    (folder / "state").mkdir()
    (folder / "cgroup").mkdir()
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [sock.getsockname()[1] for sock in held]
    values = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": folder}
    (folder / "slurm.conf").write_text(_CONF.format(ports=ports, **values))
    (folder / "cgroup.conf").write_text(_CGROUP_CONF.format(**values))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)


def _munged(cluster: Cluster) -> subprocess.Popen[bytes]:
    places = {"key": "key", "socket": "sock", "pid": "pid", "log": "log", "seed": "seed"}
    options = [
        f"--{name}{'' if name == 'socket' else '-file'}={cluster.folder}/munge.{suffix}"
        for name, suffix in places.items()
    ]
    return _daemon(cluster, "munged", "munged", "--foreground", "--force", *options)


def _daemon(cluster: Cluster, name: str, *command: str) -> subprocess.Popen[bytes]:
    with (cluster.folder / f"{name}.out").open("wb") as out:
        return subprocess.Popen(
            command,
            cwd=cluster.folder,
            env=cluster.environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _idle_nodes(cluster: Cluster) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        env=cluster.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split().count("idle")


def _end(cluster: Cluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired, OSError):
        if len(daemons) == 4:
            cluster.run("scancel", "--user", getpass.getuser())
            wait_until(lambda: not cluster.run("squeue", "--noheader"), "an empty queue", 60)
    for daemon in reversed(daemons):
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(daemon.pid, 9)
            daemon.wait()
