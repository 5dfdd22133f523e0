"""The operations on CPU: the reference path against plain composed torch, one thread.

    python -m benchmarks.kernels [--rounds N] [--sizes small] [--dtypes float32] [--compile]

Sides alternate, round by round, and are timed by the processor time of the process; figures are
medians over the rounds of what a side takes, and of the ratio within a round, because the machine's
speed drifts. Freed memory is kept, so that no side waits for new pages. Adds a JSON line an
operation and prints a table; README.md says how to read both.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.circumstances import append_row, circumstances
from benchmarks.kernels_pairs import Pair, Sizes, all_pairs

_RESULTS = Path(__file__).resolve().parent / "results" / "kernels.jsonl"
SIZES = {
    # the model of train_cpu, and a layer as wide as a CPU run bears
    "small": Sizes(8, 256, 8, 4, 688, 4096, tokens=1024, document=256),
    "wide": Sizes(2, 1024, 16, 4, 2816, 16384, tokens=1024, document=256),
    "tiny": Sizes(1, 32, 2, 1, 48, 128, tokens=16, document=8),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h
_ROUND_S = 0.02  # processor time of a side in a round, at least
SUM = "norm + swiglu + cross_entropy + adamw of a step"


def main(arguments: Sequence[str]) -> int:
    """Measure, record and print; returns the exit code."""
    options = parse(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    about = {**circumstances("kernels", options.date), "keeps_freed_memory": keep_freed_memory()}
    rows = []
    for size in options.sizes:
        for dtype in options.dtypes:
            for row in measure(SIZES[size], DTYPES[dtype], options.rounds, options.compile):
                rows.append({**about, "size": size, "dtype": dtype, **row})
                append_row(options.output, rows[-1])
    torch.set_num_threads(threads)
    print(table(rows))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command-line options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default 15)")
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=["small", "wide"], help="default: small wide"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: all"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile beside, slow to start"
    )
    parser.add_argument("--date", help="written into the rows")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="JSON lines are added here")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def measure(sizes: Sizes, dtype: torch.dtype, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """A row an operation, and one for the sum of a training step."""
    pairs = all_pairs(sizes, dtype, quick)
    rows = [interleave(pair, rounds) for pair in pairs]
    summed = [row for row, pair in zip(rows, pairs, strict=True) if pair.in_sum]
    total: dict[str, Any] = {"operation": SUM, "count": 1}
    for side in ("ours", "composed"):
        total[f"{side}_ms"] = sum(row[f"{side}_ms"] * row["count"] for row in summed)
    total["times_faster"] = total["composed_ms"] / total["ours_ms"]
    return [*rows, total]


def interleave(pair: Pair, rounds: int) -> dict[str, Any]:
    """Times of one call of each side, and their ratios."""
    sides: dict[str, Callable[[], object]] = {"ours": pair.ours, "composed": pair.composed}
    if pair.compiled is not None:
        sides["compiled"] = pair.compiled
    calls = {}
    for name, call in sides.items():
        call()
        calls[name] = max(1, round(_ROUND_S / max(1e-7, seconds(call, 1))))
    turns = [
        {name: seconds(call, calls[name]) for name, call in sides.items()} for _ in range(rounds)
    ]
    row: dict[str, Any] = {"operation": pair.name, "count": pair.count}
    for name in sides:
        row[f"{name}_ms"] = median(turn[name] for turn in turns) * 1e3
    row["times_faster"] = median(turn["composed"] / turn["ours"] for turn in turns)
    if "compiled" in sides:
        row["times_faster_than_compiled"] = median(t["compiled"] / t["ours"] for t in turns)
    return row


def keep_freed_memory() -> bool:
    """Let malloc give no memory back to the system from here on; returns whether it is glibc's.

    Otherwise each large tensor is new pages or old ones as the heap happens to lie, which moves
    times by factors, and most for the side with more intermediates.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    largest = 2**31 - 1
    return bool(set_option(_M_MMAP_MAX, 0) and set_option(_M_TRIM_THRESHOLD, largest))


def seconds(call: Callable[[], object], calls: int) -> float:
    """Processor time of one of so many calls."""
    began = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - began) / calls


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as markdown."""
    lines = [
        "| size | dtype | operation | ours, ms | composed, ms | times faster | than compiled |",
        "| --- | --- | --- | --: | --: | --: | --: |",
    ]
    for row in rows:
        compiled = row.get("times_faster_than_compiled")
        cells = [
            row["size"],
            row["dtype"],
            row["operation"],
            f"{row['ours_ms']:.3f}",
            f"{row['composed_ms']:.3f}",
            f"{row['times_faster']:.2f}",
            "" if compiled is None else f"{compiled:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
