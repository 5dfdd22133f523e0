"""What the parts of gpu_gate share: the device, deadlines, fresh inputs, poison, and timing.

Times are those of the device: a batch of calls is queued behind a pause, so that the host is ahead
and its launch cost does not count, and lies between two events. Call i works on input set i mod n;
the sets together are larger than the L2 cache. A dry run counts one call by the host's clock.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]  # tensors and plain values by name
Row = dict[str, Any]

_BATCHES = 7
_BATCH_S = 4e-3  # device time of a batch, about
_CALLS = 32  # most calls in a batch
_SETS = 8  # most input sets
_CLOCK_HZ = 1.98e9


class Late(Exception):
    """A part's time is used up; what is left is skipped, and a row says so."""


class Dead(Exception):
    """The device answers no more; only another process can go on."""


@dataclass
class Gate:
    """One process of the gate: its device, its end, and where its rows go."""

    device: torch.device
    dry: bool
    until: float  # time.time() at which the running part should end
    emit: Callable[[Row], None]
    ceilings: dict[str, float] = field(default_factory=dict)  # measured: copy_tb_per_s, ...

    @property
    def left_s(self) -> float:
        return self.until - time.time()

    def require(self, seconds: float, what: str) -> None:
        """Raise Late where less than this is left for `what`."""
        if self.left_s < seconds:
            raise Late(f"{what}: {max(0.0, self.left_s):.0f} s left of this part, {seconds:.0f} s")

    @contextmanager
    def guarded(self, row: Row) -> Iterator[None]:
        """Turn what the block raises into a row, and go on; Late and Dead pass."""
        try:
            yield
        except (Late, Dead):
            raise
        except Exception as error:
            self.emit({**row, "error": describe(error)})
            self.require_alive()
        self.free()

    def require_alive(self) -> None:
        """Raise Dead where the device has failed: after a bad access nothing works on it."""
        try:
            self.synchronize()
        except Exception as error:
            raise Dead(f"the device failed, the rest of this part is lost: {error}") from error

    def free(self) -> None:
        """Give freed memory back, for the next measurement may need it in one piece."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def draw(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        """Standard normal values, made on the device."""
        generator = torch.Generator(self.device).manual_seed(seed)
        wide = torch.randn(shape, generator=generator, device=self.device)
        return wide.to(dtype)

    def integers(self, top: int, *shape: int, seed: int = 0) -> Tensor:
        """int64 values below `top`."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randint(0, top, shape, generator=generator, device=self.device)

    def input_sets(self, make: Callable[[int], Inputs]) -> list[Inputs]:
        """As many sets of inputs as do not fit in the L2 cache together."""
        sets = [make(0)]
        if self.dry:
            return [*sets, make(1)]
        l2 = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 64 << 20)
        count = -(-4 * l2 // max(1, num_bytes(sets[0])))
        return sets + [make(seed) for seed in range(1, min(_SETS, count))]

    def time_s(self, call: Callable[[Inputs], object], sets: Sequence[Inputs]) -> float:
        """Median over batches of a call's mean device time; the first calls warm up."""
        for inputs in sets[: 1 if self.dry else _SETS]:
            call(inputs)
        self.synchronize()
        if self.device.type != "cuda":
            began = time.perf_counter()
            call(sets[-1])
            return time.perf_counter() - began
        host_s, device_s = self._batch(call, sets, 3, 0.0)
        calls = max(2, min(_CALLS, int(_BATCH_S / device_s)))
        pause_s = min(0.05, 1.3 * calls * host_s)
        return median(self._batch(call, sets, calls, pause_s)[1] for _ in range(_BATCHES))

    def _batch(
        self, call: Callable[[Inputs], object], sets: Sequence[Inputs], calls: int, pause_s: float
    ) -> tuple[float, float]:
        """(host seconds, device seconds) a call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        if pause_s:
            torch.cuda._sleep(int(pause_s * _CLOCK_HZ))
        start.record()
        began = time.perf_counter()
        for index in range(calls):
            call(sets[index % len(sets)])
        host_s = (time.perf_counter() - began) / calls
        end.record()
        end.synchronize()
        return host_s, start.elapsed_time(end) / 1e3 / calls


def describe(error: BaseException) -> str:
    """An error in one line of bounded length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:600]


def num_bytes(inputs: Inputs) -> int:
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)


def copied(inputs: Inputs) -> Inputs:
    """Inputs whose tensors may be overwritten."""
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that is allocated without values is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes torch fill fresh memory
    assert torch.empty(3).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN or not."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
