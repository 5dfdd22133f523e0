"""Marks in time on the device that does the work: host clock on CPU, events on CUDA.

On CUDA a mark is an event on the current stream, so a wait that only stalls the stream is measured
too, and nothing is synchronised until a difference is asked for.
"""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


class Clock:
    """Marks of one device."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"

    def mark(self) -> Mark:
        """Now, on this device."""
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def seconds_between(first: Mark, second: Mark) -> float:
    """Seconds from one mark to another of the same clock; on CUDA waits for the later one."""
    if isinstance(first, torch.cuda.Event):
        assert isinstance(second, torch.cuda.Event)
        second.synchronize()
        return first.elapsed_time(second) / 1e3
    assert isinstance(second, float)
    return second - first
