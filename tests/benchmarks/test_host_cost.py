"""benchmarks/host_cost.py as a command: the budgets of launches and of Python calls of a layer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT

# Of a layer and microbatch at tp 2, forward and backward. Python and triton have their part in the
# calls: 1,278 with 3.11 and triton 3.6 or 3.9.
CALLS = 1290


def test_launches_and_calls_of_a_layer_keep_their_budgets(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.host_cost", "--rounds=1", f"--output={output}"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    row = json.loads(output.read_text(encoding="utf-8"))
    # four products forward and eight backward; the 15th kernel sums the parts of dk and dv, which
    # are divided where there are few heads
    assert (row["products"], row["triton"], row["other_launches"]) == (12, 15, 0)
    assert row["calls"] <= CALLS
    assert row["cpu_ms"] > 0
    assert "12 products, 15 Triton launches, 0 others" in done.stdout
    # other packages' layers are in the row where they are installed, and left out by name elsewhere
    for package in ("transformers", "torchtitan", "megatron"):
        there = importlib.util.find_spec(package) is not None
        assert (f"{package}_calls" in row) == there
        assert (f"{package}: left out, it is not installed" in done.stdout) == (not there)
