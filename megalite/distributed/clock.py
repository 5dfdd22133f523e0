"""Marks in time on the device that does the work: host clock on CPU, events on CUDA.

On CUDA a mark is an event on the current stream. A collective's `wait` there only makes the stream
wait, so two marks around it measure how long the device stood still, which the host's clock cannot
see. Nothing is synchronised until a difference is computed (`seconds_between`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

Mark = float | torch.cuda.Event


class Clock:
    """Makes marks on one device. Events that come back through `recycle` are recorded again."""

    def __init__(self, device: torch.device) -> None:
        self.of_stream = device.type == "cuda"  # marks stand in the stream, not in the host's time
        self._free: list[torch.cuda.Event] = []

    def mark(self, host_s: float | None = None) -> Mark:
        """The present moment on this device: host seconds, or an event on the current stream.

        `host_s`: the host's clock as just read, which a mark of that clock then equals exactly.
        """
        if not self.of_stream:
            return time.perf_counter() if host_s is None else host_s
        event = self._free.pop() if self._free else _new_event()
        event.record()
        return event

    def recycle(self, marks: Iterable[Mark]) -> None:
        """Reuse the events of marks that are no longer needed, which is cheaper than new ones."""
        self._free += [mark for mark in marks if isinstance(mark, torch.cuda.Event)]


def seconds_between(first: Mark, second: Mark) -> float:
    """Seconds from one mark to another of the same clock; on CUDA waits for the later one."""
    if isinstance(first, torch.cuda.Event):
        assert isinstance(second, torch.cuda.Event)
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3
    assert isinstance(second, float)
    return second - first


def _new_event() -> torch.cuda.Event:
    made: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
    return made
