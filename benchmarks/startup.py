"""How long commands take to answer and runs to take their first step.

    python -m benchmarks.startup [--rounds 7] [--date YYYY-MM-DD]

Each command is a new process, in turn with `python -c "import torch"`, which is what nobody who
trains with torch gets around; medians of wall time, and ratios to it. First steps are of a tiny
model on random tokens: one process, and tp 2 x pp 2 x dp 2 on eight. Appends a JSON line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.circumstances import append_row, circumstances
from megalite.corpus.indexed_writer import IndexedWriter

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = Path(__file__).resolve().parent / "results" / "startup.jsonl"
_MEGALITE = str(Path(sys.executable).parent / "megalite")
_CONFIG = str(_ROOT / "configs" / "quickstart.toml")
_PEER = "import_torch"
_SERIAL = (
    "parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=1",
    "parallel.sequence_parallel=false", "pipeline.schedule=1f1b",
)  # fmt: skip


def commands(folder: Path) -> dict[str, list[str]]:
    """What is timed, by name; `folder` holds a dataset and takes the runs."""
    first_step = [
        _MEGALITE, "train", _CONFIG, "--local", f"out={folder}", f"data.path={folder / 'data'}",
        "data.tokenizer=none", "data.split=[1.0, 0.0]", "train.steps=1", "eval.interval=0",
        "optimizer.warmup_steps=0",
    ]  # fmt: skip
    return {
        _PEER: [sys.executable, "-c", "import torch"],
        "help": [_MEGALITE, "--help"],
        "print_config": [_MEGALITE, "train", _CONFIG, "--print-config"],
        "config_mistake": [_MEGALITE, "train", _CONFIG, "train.lr=1"],
        "schedule": [_MEGALITE, "schedule", "zb-v", "--pp", "4", "--microbatches", "8"],
        "first_step": [*first_step, *_SERIAL],
        "first_step_8_processes": first_step,
    }


def write_tokens(prefix: Path) -> None:
    generator = np.random.default_rng(0)
    with IndexedWriter(prefix, 512) as writer:
        for _ in range(64):
            writer.add_document(generator.integers(0, 512, 1000))
        writer.publish()


def seconds(command: Sequence[str], expected: int) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    took = time.perf_counter() - began
    if done.returncode != expected:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--date", help="written into the row")
    options = parser.parse_args()
    row = circumstances("startup", options.date) | {"rounds": options.rounds}
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        write_tokens(Path(place) / "data")
        for number in range(options.rounds):
            for name, command in commands(Path(place)).items():
                changed = [*command, "--name", f"{name}-{number}"]
                used = changed if name.startswith("first_step") else command
                taken = seconds(used, 2 if name == "config_mistake" else 0)
                times.setdefault(name, []).append(taken)
    row["seconds"] = {name: round(median(taken), 3) for name, taken in times.items()}
    peer = median(times[_PEER])
    row["over_import_torch"] = {
        name: round(median(taken) / peer, 2) for name, taken in times.items() if name != _PEER
    }
    append_row(_RESULTS, row)
    for name, taken in row["seconds"].items():
        print(f"{name:<24} {taken:7.3f} s  {taken / peer:6.2f} x import torch")


if __name__ == "__main__":
    main()
