"""The decision about a Slurm job after an attempt: done, requeue, or stop with a reason.

pretrain.sbatch calls it on the job's first node. It reads the run folder and the logs of the nodes
and imports neither torch nor megalite. A job's attempts are lines of `attempts.jsonl` in its
folder.

    supervise.py folder < SETTINGS        print the run folder, from `megalite train --print-config`
    supervise.py begin RUN LOGS ATTEMPT   record the step from which the attempt starts
    supervise.py end RUN LOGS ATTEMPT CODE SIGNAL
                                          print a reason; exit code 0 is done, 75 requeue, else stop
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

REQUEUE = 75  # EX_TEMPFAIL: the exit code of a rank that saved on a signal
USER_ERROR = 2

# Attempts in a row without a new checkpoint after which the job is stopped.
STRIKES = 2

_SETTING = re.compile(r'^(name|out)\s+("(?:[^"\\]|\\.)*")')
_ERROR = re.compile(r"^(?:\[rank \d+\] )?error: ")
_STEP = re.compile(r"step-(\d{8,})")


def run_folder(settings: str) -> Path:
    """The run folder in the output of `--print-config`. Raises KeyError if there is none."""
    found: dict[str, str] = {
        m[1]: json.loads(m[2]) for line in settings.splitlines() if (m := _SETTING.match(line))
    }
    return Path(found["out"]) / found["name"]


def newest_step(run: Path) -> int:
    """The step of the newest finished checkpoint; -1 if there is none."""
    folder = run / "checkpoints"
    names = [path.name for path in folder.glob("step-*/") if (path / "manifest.json").is_file()]
    return max((int(m[1]) for name in names if (m := _STEP.fullmatch(name))), default=-1)


def begin(run: Path, logs: Path, attempt: int) -> None:
    """Append a line for an attempt to attempts.jsonl, with its newest checkpoint's step."""
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "attempts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"attempt": attempt, "from_step": newest_step(run)}) + "\n")


def end(run: Path, logs: Path, attempt: int, code: int, signal: str) -> tuple[int, str]:
    """(exit code, reason) after an attempt whose srun ended with `code`.

    signal: the name of the signal that the batch script got, or "".
    """
    step = newest_step(run)
    if code == 0:
        return 0, f"finished; newest checkpoint: {_named(step)}"
    if signal == "TERM":
        return 128 + 15, f"cancelled or preempted; newest checkpoint: {_named(step)}"
    errors = user_errors(logs / f"attempt-{attempt}")
    if errors:
        return USER_ERROR, "an error that a new attempt would meet again: " + "; ".join(errors[:4])
    idle = idle_attempts(logs, step)
    if idle >= STRIKES:
        return code, (
            f"{idle} attempts in a row saved no new checkpoint (newest: {_named(step)}); the last "
            f"ended with code {code}, see {logs}"
        )
    cause = "the time limit is near" if signal == "USR1" else f"srun ended with code {code}"
    return REQUEUE, f"{cause}; goes on from {_named(step)}"


def idle_attempts(logs: Path, step: int) -> int:
    """The number of last attempts that started from the checkpoint that is still the newest.

    An attempt that Slurm itself requeued, because a node failed, counts too.
    """
    lines = (logs / "attempts.jsonl").read_text(encoding="utf-8").splitlines()
    starts = [json.loads(line)["from_step"] for line in lines]
    return len(list(itertools.takewhile(lambda start: start >= step, reversed(starts))))


def user_errors(folder: Path) -> list[str]:
    """The "error:" lines in an attempt's logs, each once: mistakes that the user must fix."""
    found: dict[str, None] = {}
    for log in sorted(folder.glob("*.log")):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if match := _ERROR.match(line):
                found[line[match.end() :]] = None
    return list(found)


def _named(step: int) -> str:
    """A checkpoint's step for a message."""
    return "none" if step < 0 else f"step {step}"


def main(verb: str, *arguments: str) -> int:
    """Run one verb; returns the exit code."""
    if verb == "folder":
        print(run_folder(sys.stdin.read()))
        return 0
    run, logs, attempt = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    if verb == "begin":
        begin(run, logs, attempt)
        return 0
    verdict, why = end(run, logs, attempt, int(arguments[3]), arguments[4])
    print(why)
    return verdict


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
