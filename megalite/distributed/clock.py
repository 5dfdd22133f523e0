"""Marks in time on the device that does the work: host clock on CPU, events on CUDA.

On CUDA a mark is an event on the current stream. A collective's `wait` there only makes the stream
wait, so two marks around it measure how long the device stood still, which the host's clock cannot
see; and nothing is synchronised until a difference is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

Mark = float | torch.cuda.Event


class Clock:
    """Marks of one device. Events that were given back (`recycle`) are recorded again."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> Mark:
        """Now, on this device."""
        if not self._events:
            return time.perf_counter()
        event = self._free.pop() if self._free else _new_event()
        event.record()
        return event

    def recycle(self, marks: Iterable[Mark]) -> None:
        """Give marks back that nobody will ask for again; making an event costs more than this."""
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
    made: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return made
