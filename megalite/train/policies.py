"""The policy for loss spikes: their definition, and whether to skip the step or end the run.

The loss of a step is a spike if it lies above the median of the last `window` normal losses by more
than `threshold` deviations. A deviation is 1.4826 times the median absolute deviation of the window
(the standard deviation, were the losses normal), and at least 1 % of the median, so that a quiet
window does not make every ripple a spike. There is no verdict until the window is full, and losses
that are not finite are left to `optimizer.non_finite`.

The loss of the whole global batch is judged, after all ranks have summed it and before the update,
so that all decide alike. `stop` ends the run with weights and optimizer untouched; `skip` leaves
them untouched, goes on with the next data, and stops after `optimizer.max_skips` spikes in a row. A
spike does not enter the window. The window is part of the checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from megalite.config import RunConfig
from megalite.errors import MegaliteError
from megalite.wording import number_of

SPIKE, NON_FINITE = "loss spike", "non-finite gradients"

_NORMAL = 1.4826  # standard deviation over median absolute deviation of a normal distribution
_FLOOR = 0.01  # smallest deviation, as a share of the median


class LossSpikeError(MegaliteError):
    """The loss is a spike, and the settings end the run (or too many steps were skipped)."""


@dataclass(frozen=True)
class Spike:
    """A loss, and the median and deviation of the window that it was compared with."""

    loss: float
    median: float
    deviation: float
    stop: bool  # the run is to stop; otherwise the step is to be skipped

    @property
    def text(self) -> str:
        """The spike in words, with its numbers."""
        over = (self.loss - self.median) / self.deviation
        return (
            f"loss {self.loss:.4f} is {over:.1f} deviations of {self.deviation:.4f} above the "
            f"median {self.median:.4f}"
        )


class SpikeGuard:
    """The running window of normal losses, and the verdict on the next one."""

    def __init__(self, config: RunConfig) -> None:
        train = config.train
        self.policy = train.loss_spike
        self.threshold = train.loss_spike_threshold
        self.max_skips = config.optimizer.max_skips
        self.losses: deque[float] = deque(maxlen=train.loss_spike_window)
        self.in_a_row = 0  # spikes skipped since the last normal loss

    @property
    def active(self) -> bool:
        """True if losses are judged at all."""
        return self.policy != "off"

    def judge(self, loss: float) -> Spike | None:
        """None for a normal loss, which enters the window; otherwise the spike."""
        spike = self._spike(loss)
        if spike is None:
            self.in_a_row = 0
            if math.isfinite(loss):
                self.losses.append(loss)
            return None
        if not spike.stop:
            self.in_a_row += 1
        return spike

    def message(self, step: int, spike: Spike) -> str:
        """The error message of a run that stops at `step` (from 1)."""
        skipped = (
            f", after {number_of(self.in_a_row, 'skipped step')} in a row"
            if self.policy == "skip"
            else ""
        )
        change = (
            'set train.loss_spike = "skip"'
            if self.policy == "stop"
            else "raise optimizer.max_skips"
        )
        return (
            f"step {step}: {spike.text}{skipped}; weights and optimizer state are as before this "
            f"step. Lower optimizer.lr, check the data, raise train.loss_spike_threshold, or "
            f"{change}"
        )

    def state(self) -> dict[str, Any]:
        """The window and the count of skips, for a checkpoint."""
        return {"losses": list(self.losses), "in_a_row": self.in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the values that `state` returned; a shorter window keeps the newest losses."""
        self.losses.clear()
        self.losses.extend(state["losses"])
        self.in_a_row = state["in_a_row"]

    def _spike(self, loss: float) -> Spike | None:
        if not math.isfinite(loss) or len(self.losses) < (self.losses.maxlen or 0):
            return None
        middle = median(self.losses)
        spread = median(abs(value - middle) for value in self.losses)
        deviation = max(_NORMAL * spread, _FLOOR * abs(middle), 1e-12)
        if loss <= middle + self.threshold * deviation:
            return None
        stop = self.policy == "stop" or self.in_a_row >= self.max_skips
        return Spike(loss, middle, deviation, stop)
