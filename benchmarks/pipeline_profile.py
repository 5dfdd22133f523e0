"""Where the time of a pipeline step goes beside its sleeps: the cost of each kind of action.

    python -m benchmarks.pipeline_profile [--ranks 4] [--microbatches 16] [--kib 32] [--rt]

Stages sleep as in `benchmarks.pipeline`; the runtime's own trace gives when each action began, when
its message was there and when it ended. Per kind of action: how many a rank runs in a step, and the
median microseconds of one without what it sleeps. "hop": from the start of a send to the moment the
waiting rank goes on, for messages that were waited for. Prints a table and appends JSON lines.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.circumstances import append_row, circumstances
from benchmarks.lanes import Lane
from benchmarks.pipeline import CONTENDERS, Load, MegaliteSteps, parse
from megalite.layout.topology import Topology
from megalite.schedules import Action

_RESULTS = Path(__file__).resolve().parent / "results" / "pipeline_profile.jsonl"
_WAITED_S = 100e-6  # a receive that took longer was waited for

Times = tuple[float, float, float]  # an action's begin, message there, end; CLOCK_MONOTONIC
Timeline = list[tuple[Action, Times]]


class TracedSteps(MegaliteSteps):
    """A lane's worker that tells when each action began and ended."""

    def timeline(self) -> Timeline:
        """One traced step of this rank."""
        origin = time.perf_counter()
        self.runtime.run(self.batches, trace=True)
        spans = self.runtime.trace
        begins = [0.0, *(span.end for span in spans)]
        return [
            (span.action, (origin + begin, origin + span.start, origin + span.end))
            for begin, span in zip(begins, spans, strict=False)
        ]


def costs(lines: list[Timeline], load: Load) -> dict[str, list[float]]:
    """Seconds beside the sleeps, by kind of action, over all ranks of a step; and the hops."""
    asleep = {"F": load.forward_s, "B": load.input_s, "W": load.weight_s}
    asleep["BW"] = load.input_s + load.weight_s
    found: dict[str, list[float]] = defaultdict(list)
    sent: dict[Action, float] = {}  # the receive that matches -> when its send began
    for line in lines:
        for action, (begin, _, _) in line:
            if action.kind == "SF":
                sent[Action("RF", action.stage + 1, action.mb)] = begin
            elif action.kind == "SB":
                sent[Action("RB", action.stage - 1, action.mb)] = begin
    for line in lines:
        for action, (begin, ready, end) in line:
            found[action.kind].append(end - ready - asleep.get(action.kind, 0.0))
            if ready - begin > _WAITED_S:
                receive = "RF" if action.kind == "F" else "RB"
                found["hop"].append(ready - sent[Action(receive, action.stage, action.mb)])
    return found


def main() -> None:
    options = parse(sys.argv[1:])
    for name in options.only:
        row = {**circumstances("pipeline_profile", options.date), **measure(name, options)}
        append_row(_RESULTS if options.output.name == "pipeline.jsonl" else options.output, row)
        print(f"{name}: {row['actions_a_rank']:.0f} actions a rank and step, us beside the sleep")
        for kind, (count, micros) in row["micros"].items():
            print(f"  {kind:4} {count:5.1f} x {micros:6.0f}", flush=True)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a schedule: for each kind, how many a rank and step, and median microseconds."""
    p, m, seconds = options.ranks, options.microbatches, options.ms / 1e3
    load = Load(seconds, seconds, seconds, round(options.kib * 256))
    found: dict[str, list[float]] = defaultdict(list)
    with Lane(name, Topology(pp=p), TracedSteps, (name, m, load, options.rt)) as lane:
        for index in range(options.steps + 2):
            lines = lane.call("timeline")
            if index >= 2:
                for kind, values in costs(lines, load).items():
                    found[kind] += values
    rows = p * options.steps
    return {
        "schedule": name,
        "ranks": p,
        "chunks": CONTENDERS[name][0],
        "microbatches": m,
        "message_kib": options.kib,
        "stage_ms": options.ms,
        "real_time": options.rt,
        "actions_a_rank": sum(len(v) for kind, v in found.items() if kind != "hop") / rows,
        "micros": {
            kind: [len(values) / rows, round(1e6 * median(values))]
            for kind, values in sorted(found.items())
        },
    }


if __name__ == "__main__":
    main()
