"""Traces of time lines: measured steps as a file in a run folder, and Chrome traces."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megalite.errors import ScheduleError
from megalite.schedules.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    RECOMPUTE,
    Action,
    Schedule,
    parse,
)
from megalite.schedules.check import check_schedule
from megalite.schedules.memory import memory_over_time
from megalite.schedules.simulate import Durations, TimedAction, Timeline
from megalite.schedules.view.draw_text import label

TRACE_FILE = "pipeline.json"  # in a run folder


@dataclass(frozen=True)
class Measured:
    """One measured step of a pipeline: its schedule and its time line, in seconds."""

    name: str
    step: int
    schedule: Schedule
    timeline: Timeline

    @classmethod
    def of(
        cls, name: str, step: int, schedule: Schedule, spans: list[list[TimedAction]]
    ) -> Measured:
        """From each rank's actions, of which transfers are left out."""
        rows = [[span for span in row if span.action.kind in COMPUTE] for row in spans]
        programs = tuple(tuple(span.action for span in row) for row in rows)
        starts = tuple([span.start for span in row] for row in rows)
        ends = tuple([span.end for span in row] for row in rows)
        return cls(name, step, schedule, Timeline(programs, starts, ends))

    def durations(self) -> Durations:
        """Median time of each stage's actions; hops are free, as waiting is no action."""
        times: dict[tuple[str, int], list[float]] = {}
        for row in self.timeline.spans:
            for action, start, end in row:
                times.setdefault((action.kind, action.stage), []).append(end - start)
        least = 1e-9  # times must be positive

        def medians(kind: str) -> tuple[float, ...]:
            stages = range(self.schedule.num_stages)
            return tuple(max(least, median(times.get((kind, s), [0.0]))) for s in stages)

        # A stage runs its backwards split or fused; of a fused one, each gradient counts as half.
        fused = medians(BACKWARD)
        input_s = tuple(b + f / 2 for b, f in zip(medians(BACKWARD_INPUT), fused, strict=True))
        weight_s = tuple(w + f / 2 for w, f in zip(medians(BACKWARD_WEIGHT), fused, strict=True))
        return Durations(medians(FORWARD), input_s, weight_s, recompute=medians(RECOMPUTE))

    def to_json(self) -> str:
        """Text that `read_trace` reads back."""
        rows = [
            [[str(action), start, end] for action, start, end in row] for row in self.timeline.spans
        ]
        record = {"name": self.name, "step": self.step, "schedule": str(self.schedule)}
        return json.dumps({**record, "spans_s": rows}) + "\n"


def read_trace(run: Path) -> Measured:
    """The step that a run recorded, from its run folder.

    Raises ScheduleError where there is no record, and where the file is not one.
    """
    path = run / TRACE_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        schedule = parse(record["schedule"])
        check_schedule(schedule)
        rows = [
            [TimedAction(_action(word), float(start), float(end)) for word, start, end in row]
            for row in record["spans_s"]
        ]
        measured = Measured.of(str(record["name"]), int(record["step"]), schedule, rows)
    except OSError:
        raise ScheduleError(
            f"{path} cannot be read; train the run with pipeline.trace_step=N to record its Nth "
            "step"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ScheduleError(f"{path} is no recorded step: {error!r}; record it again") from None

    # The simulation beside it takes the schedule's order: both must be of the same actions.
    if measured.timeline.programs != schedule.keep(COMPUTE).ranks:
        raise ScheduleError(f"{path}: the recorded actions are not those of its schedule")
    return measured


def _action(word: str) -> Action:
    """An action from its text form."""
    line = parse(f"p=1 v=1 m=1 place=0\n0: {word}")
    return line.ranks[0][0]


def chrome_trace(
    schedule: Schedule,
    timeline: Timeline,
    *,
    unit_us: float = 1000.0,
    measured: Timeline | None = None,
) -> str:
    """A Chrome trace as JSON, with a process per rank.

    A process has its simulated actions, below them the measured ones if given, and a counter of the
    activations that the rank holds. unit_us: microseconds of one unit of the time lines.
    """
    events: list[dict[str, Any]] = []
    held = memory_over_time(schedule, timeline)
    lanes = {"simulated": timeline}
    if measured is not None:
        lanes["measured"] = measured

    # "X" is a complete event, "C" a counter, "M" (`_name`) metadata; `pid` and `tid` are the lanes
    # of the viewer.
    for rank in range(schedule.p):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        for thread, (name, line) in enumerate(lanes.items()):
            events.append(_name("thread_name", rank, thread, name))
            events += [
                {
                    "name": label(action, schedule),
                    "cat": action.kind,
                    "ph": "X",
                    "ts": start * unit_us,
                    "dur": (end - start) * unit_us,
                    "pid": rank,
                    "tid": thread,
                    "args": {"stage": action.stage, "microbatch": action.mb},
                }
                for action, start, end in line.spans[rank]
            ]
        events += [
            {"name": "held", "ph": "C", "ts": time * unit_us, "pid": rank, "args": {"held": value}}
            for time, value in held[rank]
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _name(kind: str, rank: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": text}}
