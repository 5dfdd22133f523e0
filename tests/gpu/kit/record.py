"""Records cases in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests import ROOT
from tests.gpu.kit import trace
from tests.gpu.kit.case import Case
from tests.gpu.kit.trace import Trace

BOUND_S = 600


def record(cases: Sequence[Case], library: Path, folder: Path) -> list[list[Trace]]:
    """For each case the traces of its ranks. All run in one process: starting it is the dearest."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    command = [sys.executable, "-m", "tests.gpu.kit.child", str(library), str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=BOUND_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [trace.read(folder / f"{number}.jsonl") for number in range(len(cases))]
