"""What every result row carries: where it was measured, with what, on which code."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

_FOLDER = Path(__file__).resolve().parent


def circumstances(benchmark: str, date: str | None) -> dict[str, Any]:
    """Name, date, commit, machine and versions; the load average is that before the run."""
    return {
        "benchmark": benchmark,
        "date": date,
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[0],
        },
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    """The processor as the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add one JSON line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _git(*command: str) -> str | None:
    done = subprocess.run(["git", *command], cwd=_FOLDER, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
