"""One command for a machine with a Hopper GPU: are the kernels right, and how fast are they?

    python -m benchmarks.gpu_gate                  all parts, under 8 minutes
    python -m benchmarks.gpu_gate --tune           sweep tiles and block sizes, print a table
    python -m benchmarks.gpu_gate --dry            on any CPU, in Triton's interpreter, tiny

Run from the repository's root with torch >= 2.11 and triton >= 3.6; nothing is downloaded, and
megalite need not be installed. What no CPU can run comes first: the products of weight gradients,
the embedding's gradient, the losses of six steps beside plain torch, NCCL with one rank. Then come
every kernel's correctness, rates beside rivals, launch costs and training. JSON lines are added to
benchmarks/results/gpu_gate.jsonl (not by --dry, unless --output is given), a table comes last.
Every part has a deadline, skips what is left at it and says so. The exit code is 1 if something is
wrong, 0 otherwise, marks of speed reached or not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gate.table import CHECKS, failures, layout, summary

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_gate.jsonl"
# part -> share of the time; what a part leaves goes to those after it
PARTS = {
    "gradients": 20,
    "losses": 50,
    "nccl": 20,
    "ceilings": 20,
    "correctness": 110,
    "rates": 110,
    "launches": 20,
    "train": 110,
}
TUNE = {"ceilings": 20, "tune": 420}
WORKERS = 8  # processes that compile and check side by side
DRY_S = 3600.0  # a dry run leaves nothing out, however slow the machine
GRACE_S = 15.0  # a part that does not stop by itself is stopped
Row = dict[str, Any]


class NoGpu(Exception):
    """There is nothing to measure."""


def main(arguments: Sequence[str]) -> int:
    """Run the parts and print the table; returns the exit code."""
    options = parse(arguments)
    output = options.output or (None if options.dry else RESULTS)
    rows: list[Row] = []
    try:
        for row in run(options):
            rows.append(row)
            if output is not None:
                with output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    except NoGpu as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in rows:
        if "table" in row and row["part"] == "tune":
            print(f"kernels/configs/sm90.json{' (dry: means nothing)' if options.dry else ''}:")
            print(layout(row["table"]))
    print(summary(rows, options.dry))
    checked = {row["part"] for row in rows if "correct" in row}
    return int(bool(failures(rows)) or not checked.issuperset({*CHECKS} & {*options.parts}))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command-line options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="on the CPU, interpreted, tiny shapes")
    parser.add_argument("--tune", action="store_true", help="sweep and print a table instead")
    parser.add_argument("--parts", help="comma-separated, default: all")
    parser.add_argument("--budget", type=float, default=440.0, help="seconds in all (default 440)")
    parser.add_argument("--date", help="written into the rows")
    parser.add_argument("--output", type=Path, help="file that JSON lines are added to")
    options = parser.parse_args(arguments)
    known = {**PARTS, **TUNE} if options.dry else TUNE if options.tune else PARTS
    options.parts = options.parts.split(",") if options.parts else list(known)
    unknown = [name for name in options.parts if name not in known]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    options.weights = [known[name] for name in options.parts]
    if options.budget <= 0:
        parser.error("--budget must be positive")
    return options


def run(options: argparse.Namespace) -> Iterator[Row]:
    """All rows, part by part. A dry run has one process for all, a real one some for each.

    Raises NoGpu.
    """
    end = time.time() + (DRY_S if options.dry else options.budget)
    shared = {"dry": options.dry, "date": options.date, "share": [0, 1]}
    if options.dry:
        parts = ["environment", *options.parts]
        yield from children([{**shared, "parts": parts, "until": end, "ceilings": {}}])
        return
    ceilings: Row = {}
    for index, part in enumerate(options.parts):
        left = max(0.0, end - time.time())
        until = time.time() + left * options.weights[index] / sum(options.weights[index:])
        parts = ["environment", part] if index == 0 else [part]
        count = WORKERS if part == "correctness" else 1
        order = {**shared, "parts": parts, "until": until, "ceilings": ceilings}
        print(f"{part}: {until - time.time():.0f} s", file=sys.stderr, flush=True)
        found = children([{**order, "share": [worker, count]} for worker in range(count)])
        if index == 0 and not any("gpu" in row for row in found):
            raise NoGpu("no CUDA device was found; --dry needs none")
        ceilings |= {
            name: row[name]
            for row in found
            for name in ("copy_tb_per_s", "gemm_tflop_per_s")
            if name in row and row["part"] == "ceilings"
        }
        yield from found


def children(orders: Sequence[Row]) -> list[Row]:
    """Rows of processes that run side by side until each has done its order."""
    rows: list[Row] = []
    lock = threading.Lock()

    def follow(order: Row) -> None:
        found = child(order)
        with lock:
            rows.extend(found)

    threads = [threading.Thread(target=follow, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows


def child(order: Row) -> list[Row]:
    """Rows of one process; that it died or had to be stopped is a row as well."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if order["dry"]:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gate.child", json.dumps(order)]
    limit = order["until"] - time.time() + GRACE_S
    fault = None
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, timeout=limit)
            if done.returncode:
                fault = f"the process ended with exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            fault = f"stopped {GRACE_S:.0f} s after its deadline"
        file.seek(0)
        rows: list[Row] = [json.loads(line) for line in file if line.startswith("{")]
    if fault is not None:
        part = rows[-1]["part"] if rows else order["parts"][-1]
        wrong = {"correct": False} if part in CHECKS and fault.startswith("the ") else {}
        rows.append({"part": part, **wrong, "error": fault})
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
