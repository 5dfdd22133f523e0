"""What gpu_gate starts: a process that runs some parts and prints a JSON line a row.

    python -m benchmarks.gate.child JSON    (the keys are those that gpu_gate.py writes)

Parts have processes of their own on a GPU, because after a bad access a process is lost. megalite
need not be installed: a plain checkout is made importable. The repository's root leaves the path,
as kernels/ is not to be taken for the package of that name.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def importable() -> None:
    """Import megalite from this checkout and take its root off the path."""
    for name in ("megalite", "benchmarks", "tests.tolerances"):
        importlib.import_module(name)
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


def environment(date: str | None) -> dict[str, Any]:
    """Where and with what everything after this row was measured."""
    import torch
    import triton

    from benchmarks.circumstances import circumstances
    from megalite.kernels.triton.tables import table_hash

    found = circumstances("gpu_gate", date)
    found |= {"triton": triton.__version__, "cuda": torch.version.cuda, "table_hash": table_hash()}
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": device.name,
            "capability": [device.major, device.minor],
            "memory_bytes": device.total_memory,
            "multiprocessors": device.multi_processor_count,
        }
    return found


def parts_of(gate: Any, order: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """What each part runs; imported as late as possible, so that one cannot stop the others."""

    def gradients() -> None:
        from benchmarks.gate.gradients import gradients

        gradients(gate)

    def losses() -> None:
        from benchmarks.gate.losses import losses

        losses(gate)

    def nccl() -> None:
        from benchmarks.gate.collectives import collectives

        collectives(gate)

    def ceilings() -> None:
        from benchmarks.gate.rates import ceilings

        gate.ceilings.update(ceilings(gate))
        gate.emit(dict(gate.ceilings))

    def correctness() -> None:
        from benchmarks.gate.check import run

        run(gate, tuple(order["share"]))

    def rates() -> None:
        from benchmarks.gate.rates import rates

        rates(gate)

    def launches() -> None:
        from benchmarks.gate.rates import launches

        launches(gate)

    def train() -> None:
        from benchmarks.gate.train import train

        train(gate)

    def tune() -> None:
        from benchmarks.gate.tune import tune

        tune(gate)

    return {
        "environment": lambda: gate.emit(environment(order["date"])),
        "gradients": gradients,
        "losses": losses,
        "nccl": nccl,
        "ceilings": ceilings,
        "correctness": correctness,
        "rates": rates,
        "launches": launches,
        "train": train,
        "tune": tune,
    }


def main(order: dict[str, Any]) -> None:
    """Run the parts that the order names; a part that raises gives a row, the next goes on."""
    began = time.time()
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not a row
    importable()
    if order["dry"]:
        from megalite.kernels.triton.interpreter_repairs import install

        install()
    import torch

    from benchmarks.gate.device import Gate, describe
    from benchmarks.gate.table import CHECKS

    torch.set_num_threads(1 if order["dry"] else torch.get_num_threads())
    current = ""

    def emit(row: dict[str, Any]) -> None:
        at = {"part": current, "at_s": round(time.time() - began, 2)}
        print(json.dumps({**at, **row}), file=rows, flush=True)

    # With its index, as a process group is bound to one device.
    device = torch.device("cpu" if order["dry"] else "cuda:0")
    gate = Gate(device, order["dry"], order["until"], emit, dict(order["ceilings"]))
    parts = parts_of(gate, order)
    for current in order["parts"]:
        try:
            parts[current]()
        except Exception as error:
            wrong = {"correct": False} if current in CHECKS else {}
            emit({**wrong, "error": describe(error)})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
