"""The position of a run: step, batches, place in each source, skipped steps, window of losses.

Everything here is the same on every rank. A checkpoint keeps `state`, and `restore` takes it up;
weights and moments belong to the engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megalite.config import RunConfig
from megalite.config.inputs import sources
from megalite.run.batch_plan import batch_plan, horizon_steps
from megalite.train.blend_position import BlendPosition
from megalite.train.changes import Changed
from megalite.train.origin import RECORD
from megalite.train.policies import SpikeGuard
from megalite.train.resume import Resumed
from megalite.train.run_data import RunData


class Position:
    """The position of a new run, until `restore`."""

    def __init__(self, config: RunConfig, data: RunData) -> None:
        self._config, self._data = config, data
        self.step = 0  # steps done
        self.plan = batch_plan(config)
        self.blend = BlendPosition.new(
            {s.name: data.identities[s.name].fingerprint for s in sources(config.data)}
        )
        self.guard = SpikeGuard(config)
        self.skips: Counter[str] = Counter()  # steps without an update so far, by reason
        self.changed: Sequence[Changed] = ()  # differences from the checkpoint resumed from
        self.saved_step: int | None = None
        self.losses: dict[int, float] = {}  # of checkpoint.keep_best, by step
        self.weights_from: dict[str, Any] | None = None  # see origin.py

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: train.steps, or as many as consume train.tokens."""
        return horizon_steps(self._config, self.plan)

    @property
    def is_last(self) -> bool:
        """True when all steps are done."""
        return self.step == self.total_steps

    def is_due(self, interval: int) -> bool:
        """True after every `interval` steps; never with 0."""
        return interval > 0 and self.step % interval == 0

    def rate(self, name: str, loss: float) -> None:
        """Take up the loss of a set at this step, if it is the one of checkpoint.keep_best."""
        if name == self._config.checkpoint.keep_best and math.isfinite(loss):
            self.losses[self.step] = loss

    def tokens_before(self, step: int) -> int:
        """Tokens that the steps before `step` consume."""
        return self.plan.first_sample(step) * self._config.data.seq_length

    def taken(self, step: int) -> list[int]:
        """Samples that the steps before `step` take from each source."""
        return self._data.train.blend.counts(self.plan.first_sample(step))

    def progress(self, step: int | None = None) -> int:
        """Progress after a step (None: the last): in steps, or in samples if batches grow."""
        step = self.total_steps if step is None else step
        return step if len(self.plan.stages) == 1 else self.plan.first_sample(step)

    def state(self) -> dict[str, Any]:
        """The position as a checkpoint keeps it."""
        return {
            "step": self.step,
            "consumed_tokens": self.tokens_before(self.step),
            "blend": self.blend.state(self.taken(self.step)),
            "stages": [list(stage) for stage in self.plan.before(self.step)],
            "spikes": self.guard.state(),
            "skips": dict(self.skips),
            RECORD: self.weights_from,
            "best": {
                "set": self._config.checkpoint.keep_best,
                "losses": [list(item) for item in self.losses.items()],
            },
        }

    def restore(self, found: Resumed) -> None:
        """Take the position of a checkpoint that was loaded."""
        self.step = self.saved_step = found.step
        self.plan, self.blend, self.changed = found.plan, found.blend, found.changed
        in_force = [self.blend.sources[source.name] for source in sources(self._config.data)]
        self._data.train.begin_at(
            self.blend.first_sample,
            [source.shuffle for source in in_force],
            [source.before for source in in_force],
        )
        self.guard.load(found.saved["spikes"])
        self.skips.update(found.saved["skips"])
        self.weights_from = found.saved.get(RECORD)
        best = found.saved.get("best", {})
        if best.get("set") == self._config.checkpoint.keep_best:
            self.losses = {int(step): float(loss) for step, loss in best.get("losses", [])}
