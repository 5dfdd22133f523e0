"""The same steps at a config's layout and on one process: do losses and gradients agree?

    python -m benchmarks.layout_losses CONFIG [SECTION.KEY=VALUE ...]    starts the processes here

Both train on the same random tokens from the same weights. Compared are the loss of every step, the
norm of its gradient, and that of every group of parameters, relative to those of one process. A row
of JSON a type comes first, a table last; the exit code is 1 if a difference is above its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.mfu_run import for_measuring, measure
from megalite.checks import open_run
from megalite.errors import EXIT_USER, MegaliteError
from megalite.layout.topology import Topology
from megalite.process.local import run_local
from megalite.record.records import read_metrics

# Type -> largest relative difference of a loss, and of a norm. Another order of sums moves them by
# some 1e-7 in float32 and 1e-3 in bfloat16; a lost or doubled part of a sum by 1e-1.
BOUNDS = {"float32": (1e-5, 1e-4), "bfloat16": (3e-3, 5e-2)}
ALONE = (
    "parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=1",
    "parallel.sequence_parallel=false", "pipeline.schedule=1f1b",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Train both and compare, in each type; returns the exit code."""
    options = parse(arguments)
    rows = []
    for dtype in options.dtypes:
        rows.append(compare(options, dtype))
        print(json.dumps(rows[-1]), flush=True)
        if options.output is not None:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    return int(not all(row["agrees"] for row in rows))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command-line options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a run's TOML file")
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--steps", type=int, default=6, help="steps of each (default 6)")
    parser.add_argument("--dtypes", default=",".join(BOUNDS), help="types (default: both)")
    parser.add_argument("--output", type=Path, help="file that JSON lines are added to")
    options = parser.parse_intermixed_args(arguments)
    options.dtypes = options.dtypes.split(",")
    unknown = [dtype for dtype in options.dtypes if dtype not in BOUNDS]
    if unknown:
        parser.error(f"no bounds for {', '.join(unknown)}; there are {', '.join(BOUNDS)}")
    return options


def compare(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """The row of one type: losses of both, largest differences, and whether they are in bounds."""
    more = (f"train.dtype={dtype}", "log.param_stats_interval=1")
    spread = [*options.settings, *more]
    alone = [one for one in spread if not one.startswith(("parallel.", "pipeline."))]
    ours = steps_of(options, spread)
    want = steps_of(options, [*alone, *ALONE])
    loss, norm = BOUNDS[dtype]
    losses = [difference(a["loss"], b["loss"]) for a, b in zip(ours, want, strict=True)]
    norms = [
        difference(a["grad_norms"][group], norm_of_group)
        for a, b in zip(ours, want, strict=True)
        for group, norm_of_group in b["grad_norms"].items()
    ]
    norms += [difference(a["grad_norm"], b["grad_norm"]) for a, b in zip(ours, want, strict=True)]
    return {
        "benchmark": "layout_losses",
        "config": options.config,
        "settings": options.settings,
        "dtype": dtype,
        "losses": [step["loss"] for step in ours],
        "losses_of_one": [step["loss"] for step in want],
        "loss_difference": max(losses),
        "loss_bound": loss,
        "norm_difference": max(norms),
        "norm_bound": norm,
        "agrees": max(losses) <= loss and max(norms) <= norm,
    }


def difference(a: float | str, b: float | str) -> float:
    """Relative to the second; infinite where a number is not finite."""
    found = abs(float(a) - float(b)) / abs(float(b))
    return found if found == found else float("inf")


def steps_of(options: argparse.Namespace, settings: Sequence[str]) -> list[dict[str, Any]]:
    """The records of the steps of a run here. Raises ConfigError, or SystemExit if it fails."""
    with tempfile.TemporaryDirectory(prefix="layout-") as folder:
        order = {
            "config": options.config,
            "settings": list(settings),
            "steps": options.steps,
            "warmup": 0,
            "data": False,
            "trace": None,
            "work": folder,
            "result": str(Path(folder) / "result.json"),
        }
        config = for_measuring(open_run(options.config, settings).config, order)
        world_size = Topology.of(config.parallel).world_size
        print(f"{config.train.dtype} on {world_size} ...", file=sys.stderr, flush=True)
        code = run_local(measure, world_size, (config, order), timeout_s=config.train.timeout_s)
        if code:
            raise SystemExit(code)
        lines = read_metrics(config.folder / "metrics.jsonl")
        return [line for line in lines if line["kind"] == "step"]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as markdown."""
    lines = [
        "| type | loss differs by | bound | norms by | bound | |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    for row in rows:
        figures = (
            row[name] for name in ("loss_difference", "loss_bound", "norm_difference", "norm_bound")
        )
        verdict = "agrees" if row["agrees"] else "DIFFERS"
        lines.append(f"| {row['dtype']} | {' | '.join(f'{x:.2g}' for x in figures)} | {verdict} |")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MegaliteError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(EXIT_USER)
