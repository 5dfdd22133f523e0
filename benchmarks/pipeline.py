"""Pipeline runtime on stages that sleep: how near a step comes to its schedule's ideal time.

    python -m benchmarks.pipeline [--ranks 4] [--microbatches 16] [--kib 32] [--rt]

A stage sleeps in its forward, for its input gradient and for its weight gradient, so a few cores
stand for many ranks on gloo. "ideal" is the simulated step with these times and free messages;
"calibrated" takes the times that a stage alone needs in its process (sleeping late, autograd), so
that what is left is the runtime's own cost. Beside megalite, the schedule classes of
torch.distributed.pipelining in the same run, their steps taken in turns. Appends JSON lines and
prints a table; README.md says how to read them.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.circumstances import append_row, circumstances
from benchmarks.lanes import Lane
from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.pipeline import BoundarySpec, PipelineRuntime
from megalite.schedules import Durations, build, simulate

_RESULTS = Path(__file__).resolve().parent / "results" / "pipeline.jsonl"
_CALIBRATION_RUNS = 12

# megalite's schedules by name with their chunks, and torch's class of the same schedule, if any.
CONTENDERS: dict[str, tuple[int, str | None]] = {
    "1f1b": (1, "1F1B"),
    "1f1b-early": (1, None),
    "zb-h1": (1, None),
    "interleaved": (2, "Interleaved1F1B"),
    "interleaved-zb": (2, "InterleavedZeroBubble"),
    "zb-v": (2, "ZBVZeroBubble"),
    "dualpipe-v": (2, "DualPipeV"),
}


@dataclass(frozen=True)
class Load:
    """What a stage does: seconds asleep per part, and the elements of a message."""

    forward_s: float
    input_s: float
    weight_s: float
    elements: int


# --- megalite ------------------------------------------------------------------------------------


class Store:
    """Where weight gradients go: asleep at once, or put off."""

    def __init__(self) -> None:
        self.deferred: list[Callable[[], None]] | None = None


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, load: Load, store: Store) -> Tensor:
        ctx.load, ctx.store = load, store
        time.sleep(load.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.load.input_s)
        if ctx.store.deferred is None:
            time.sleep(ctx.load.weight_s)
        else:
            weight_s = ctx.load.weight_s
            ctx.store.deferred.append(lambda: time.sleep(weight_s))
        return dy.clone(), None, None


class SleepStage:
    """A stage of the runtime; the first one has an embedding to give a gradient to."""

    def __init__(self, load: Load, *, last: bool) -> None:
        self.load, self.last = load, last
        self.grads = Store()
        self.embedding = torch.zeros(1, load.elements, requires_grad=True)

    def forward(self, input_tD: Tensor | None, micro_batch: Any) -> Tensor:
        x = self.embedding + 0 if input_tD is None else input_tD
        y: Tensor = _Sleep.apply(x, self.load, self.grads)
        return y.sum() if self.last else y


class MegaliteSteps:
    """A lane's worker: steps of one schedule."""

    def __init__(self, mesh: Mesh, name: str, m: int, load: Load, real_time: bool) -> None:
        _prepare(real_time)
        self.mesh = mesh
        v = CONTENDERS[name][0]
        schedule = build(name, mesh.pp.size, v, m)
        last = schedule.num_stages - 1
        mine = schedule.stages_of(mesh.pp.rank)
        self.stages = [SleepStage(load, last=stage == last) for stage in mine]
        boundary = BoundarySpec((1, load.elements), torch.float32)
        self.runtime = PipelineRuntime(schedule, self.stages, mesh, boundary)
        self.batches = [None] * m

    def step(self) -> float:
        """Seconds of one step on this rank."""
        began = time.perf_counter()
        self.runtime.run(self.batches)
        return time.perf_counter() - began

    def alone(self) -> tuple[float, float, float]:
        """Median seconds of a stage on its own: forward, input gradient, weight gradient."""
        stage = SleepStage(self.stages[0].load, last=False)
        times = []
        for _ in range(_CALIBRATION_RUNS):
            queue: list[Callable[[], None]] = []
            stage.grads.deferred = queue
            x = torch.zeros(1, stage.load.elements, requires_grad=True)
            marks = [time.perf_counter()]
            y = stage.forward(x, None)
            marks.append(time.perf_counter())
            torch.autograd.backward((y,), (torch.ones_like(y),))
            marks.append(time.perf_counter())
            queue.pop()()
            marks.append(time.perf_counter())
            times.append([b - a for a, b in pairwise(marks)])
        f, b, w = (median(column) for column in zip(*times, strict=True))
        return f, b, w


# --- torch.distributed.pipelining ----------------------------------------------------------------


class _SleepPath(torch.autograd.Function):
    """On the way of the activations: forward and input gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, load: Load) -> Tensor:
        ctx.load = load
        time.sleep(load.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.load.input_s)
        return dy.clone(), None


class _SleepWeight(torch.autograd.Function):
    """On the way of the weights: their gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, load: Load) -> Tensor:
        ctx.load = load
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.load.weight_s)
        return dy.clone(), None


class SleepModule(nn.Module):
    """The same stage as a module, split by torch between its activations and its weight."""

    def __init__(self, load: Load, *, first: bool) -> None:
        super().__init__()
        self.load = load
        self.weight = nn.Parameter(torch.zeros(load.elements))
        self.embedding = nn.Parameter(torch.zeros(load.elements)) if first else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = x + self.embedding
        out: Tensor = _SleepPath.apply(x, self.load) + _SleepWeight.apply(self.weight, self.load)
        return out


class TorchSteps:
    """A lane's worker: steps of torch's schedule of the same name."""

    def __init__(self, mesh: Mesh, name: str, m: int, load: Load, real_time: bool) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        _prepare(real_time)
        v, torch_name = CONTENDERS[name]
        assert torch_name is not None, name
        p = mesh.pp.size
        place = build(name, p, v, m).place
        mine = [stage for stage, rank in enumerate(place) if rank == mesh.pp.rank]
        stages = [
            PipelineStage(SleepModule(load, first=s == 0), s, p * v, torch.device("cpu"))
            for s in mine
        ]
        make = get_schedule_class(torch_name)
        self.schedule: Any = make(
            stages if v > 1 else stages[0], m, loss_fn=lambda y, target: y.sum()
        )
        self.arguments = (torch.zeros(m, load.elements),) if 0 in mine else ()
        self.options = {"target": torch.zeros(m, 1)} if p * v - 1 in mine else {}

    def step(self) -> float:
        """Seconds of one step on this rank."""
        began = time.perf_counter()
        self.schedule.step(*self.arguments, **self.options, return_outputs=False)
        return time.perf_counter() - began


def _prepare(real_time: bool) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if real_time:
        for thread in Path("/proc/self/task").iterdir():  # gloo's threads too
            os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(10))


# --- driver --------------------------------------------------------------------------------------


def main() -> None:
    options = parse(sys.argv[1:])
    print(f"{'schedule':16} {'ideal':>7} {'ms':>7} {'eff':>6} {'cal':>6}   torch: ms, eff, cal")
    for name in options.only:
        row = {**circumstances("pipeline", options.date), **measure(name, options)}
        append_row(options.output, row)
        print(line_of(row), flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command-line options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--kib", type=float, default=32, help="size of a message")
    parser.add_argument("--ms", type=float, default=10, help="asleep in F, B and W each")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rt", action="store_true", help="real-time scheduling (needs root)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CONTENDERS))
    parser.add_argument("--no-torch", action="store_true", help="measure megalite alone")
    parser.add_argument("--date", help="written into the rows")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="JSON lines are added here")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only if name not in CONTENDERS]
    if unknown or options.steps < 1 or options.ranks < 2:
        parser.error(f"schedules are {', '.join(CONTENDERS)}; steps >= 1, ranks >= 2")
    return options


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of megalite and torch in turns; the row of a schedule."""
    p, m, seconds = options.ranks, options.microbatches, options.ms / 1e3
    v, torch_name = CONTENDERS[name]
    load = Load(seconds, seconds, seconds, round(options.kib * 256))
    arguments = (name, m, load, options.rt)
    topology = Topology(pp=p)
    lanes = {"megalite": Lane(name, topology, MegaliteSteps, arguments)}
    if torch_name and not options.no_torch:
        lanes["torch"] = Lane(torch_name, topology, TorchSteps, arguments)
    steps: dict[str, list[float]] = {who: [] for who in lanes}
    try:
        for index in range(options.steps + 2):
            for who, lane in lanes.items():
                slowest = max(lane.call("step"))
                if index >= 2:
                    steps[who].append(slowest)
        alone = [median(part) for part in zip(*lanes["megalite"].call("alone"), strict=True)]
    finally:
        for lane in lanes.values():
            lane.close()
    schedule = build(name, p, v, m)
    ideal, calibrated = (
        simulate(schedule, Durations((f,) * p * v, (b,) * p * v, (w,) * p * v)).makespan
        for f, b, w in ((seconds, seconds, seconds), alone)
    )
    row: dict[str, Any] = {
        "schedule": name,
        "ranks": p,
        "chunks": v,
        "microbatches": m,
        "message_kib": options.kib,
        "stage_ms": options.ms,
        "real_time": options.rt,
        "ideal_s": ideal,
        "calibrated_ideal_s": calibrated,
    }
    for who, times in steps.items():
        row[f"{who}_s"] = median(times)
        row[f"{who}_efficiency"] = ideal / median(times)
        row[f"{who}_calibrated"] = calibrated / median(times)
    return row


def line_of(row: dict[str, Any]) -> str:
    """A row for people."""
    text = (
        f"{row['schedule']:16} {1e3 * row['ideal_s']:7.0f} {1e3 * row['megalite_s']:7.0f} "
        f"{row['megalite_efficiency']:6.3f} {row['megalite_calibrated']:6.3f}"
    )
    if "torch_s" in row:
        text += (
            f"   {1e3 * row['torch_s']:7.0f} {row['torch_efficiency']:6.3f} "
            f"{row['torch_calibrated']:6.3f}"
        )
    return text


if __name__ == "__main__":
    main()
