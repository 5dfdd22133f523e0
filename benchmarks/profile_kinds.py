"""Where the time of a step goes, by kind of work, from a torch.profiler trace.

An event's own time goes to the kind of the nearest event around it that decides, itself included.
Profiling costs time itself, most of all around small operations: read shares, not seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

OPTIMIZER_RANGE = "step: optimizer"
STEP_RANGE = "step"

_MATMUL = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"}


@dataclass(frozen=True)
class Profile:
    """Seconds by kind, the operations' table, and the whole step under the profiler."""

    seconds: dict[str, float]
    table: str
    step_s: float


def profile_step(step: Callable[[], float], blocked_s: Callable[[], float]) -> Profile:
    """Profile one call of `step`, which returns its own seconds.

    `blocked_s()` afterwards: seconds the host spent in operations between ranks. They count once:
    torch's own events for them are left out, so that launching one without waiting is Python's.
    """
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step_s = step()
    seconds = split(trace.events() or [])
    waited = blocked_s()
    if waited:
        seconds["collectives"] = waited
    seconds["python and autograd"] = step_s - sum(seconds.values())
    table = trace.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=48
    )
    return Profile(dict(seconds), table, step_s)


def split(events: Iterable[Any]) -> dict[str, float]:
    """Own seconds of operations by kind; ranges and autograd nodes are no operations."""
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        kind = kind_of(event)
        if kind is not None:
            seconds[kind] += event.self_cpu_time_total / 1e6
    return seconds


def kind_of(event: Any) -> str | None:
    """Kind of the event, or None where its own time is that of Python or of autograd."""
    if not event.name.startswith("aten::"):
        return None
    around = event
    while around is not None:
        if kind := _decides(around.name):
            return kind
        around = around.cpu_parent
    return "elementwise and other"


def _decides(name: str) -> str | None:
    if name == OPTIMIZER_RANGE:
        return "optimizer"
    if "scaled_dot_product" in name:
        return "attention"
    return "matmul" if name in _MATMUL else None
