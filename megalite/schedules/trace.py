"""A time line as a Chrome trace, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from typing import Any

from megalite.schedules.action import Schedule
from megalite.schedules.draw_text import label
from megalite.schedules.memory import memory_over_time
from megalite.schedules.simulate import Timeline


def chrome_trace(
    schedule: Schedule,
    timeline: Timeline,
    *,
    unit_us: float = 1000.0,
    measured: Timeline | None = None,
) -> str:
    """JSON with a process per rank: its simulated actions, its measured ones (if given) below, and
    a counter of what it holds. unit_us: microseconds of one unit of time.
    """
    events: list[dict[str, Any]] = []
    held = memory_over_time(schedule, timeline)
    for rank in range(schedule.p):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        lanes = [("simulated", timeline), *([("measured", measured)] if measured else [])]
        for thread, (name, line) in enumerate(lanes):
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
