"""How many samples each step takes, and where in the data it starts: pure functions of the step.

The batch may grow in stages, as with Megatron's `--rampup-batch-size`: with `n` stages from
`batch_ramp_start` up by `batch_ramp_increment` to below `global_batch`, stage k holds while fewer
than `(k + 1) / n` of the ramp's samples (or tokens) are consumed. A stage ends at the first step's
edge at or beyond that. A run that was resumed with another batch goes on from the samples it had
consumed, so the stages behind it are part of its plan. Reads no data and knows no ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.config import RunConfig


class Stage(NamedTuple):
    """Steps of one size: from `first_step` on, which starts at sample `first_sample` of the run."""

    first_step: int
    first_sample: int
    global_batch: int


@dataclass(frozen=True)
class BatchPlan:
    """All stages of a run, by step; the first starts at step 0, the last has no end."""

    stages: tuple[Stage, ...]

    def global_batch(self, step: int) -> int:
        """Samples of `step` (from 0), over all ranks."""
        return self._stage(step).global_batch

    def first_sample(self, step: int) -> int:
        """Samples that the steps before `step` consume: the position in the data."""
        stage = self._stage(step)
        return stage.first_sample + (step - stage.first_step) * stage.global_batch

    def steps_for(self, samples: int) -> int:
        """The fewest steps that consume at least so many samples."""
        stage = self.stages[bisect_right(self.stages, samples, key=lambda s: s.first_sample) - 1]
        left = samples - stage.first_sample
        return stage.first_step + -(-left // stage.global_batch)

    def before(self, step: int) -> list[Stage]:
        """The stages that steps before `step` belong to: what a checkpoint at `step` keeps."""
        return [stage for stage in self.stages if stage.first_step < step]

    def _stage(self, step: int) -> Stage:
        assert step >= 0, f"step {step} is negative"
        return self.stages[bisect_right(self.stages, step, key=lambda s: s.first_step) - 1]


def batch_plan(config: RunConfig, past: Sequence[Stage] = (), step: int = 0) -> BatchPlan:
    """The plan of a run, or of its rest from `step` on after the `past` stages."""
    done = BatchPlan(tuple(past)) if past else None
    sample = done.first_sample(step) if done is not None else 0
    stages = [*past]
    for stage in _stages(config, step, sample):
        if not stages or stages[-1].global_batch != stage.global_batch:
            stages.append(stage)
    return BatchPlan(tuple(stages))


def horizon_steps(config: RunConfig, plan: BatchPlan) -> int:
    """Steps of the run: train.steps, or as many as consume train.tokens."""
    if config.train.tokens is None:
        return config.train.steps
    return plan.steps_for(-(-config.train.tokens // config.data.seq_length))


def ramp_sizes(config: RunConfig) -> list[int]:
    """The batches of the ramp, without the final one; empty where there is no ramp."""
    start, increment = config.train.batch_ramp_start, config.train.batch_ramp_increment
    if start is None or increment is None:
        return []
    return list(range(start, config.train.global_batch, increment))


def _stages(config: RunConfig, step: int, sample: int) -> Iterator[Stage]:
    """The stages from (step, sample) on; those that are over by then are left out."""
    train = config.train
    sizes = ramp_sizes(config)
    # lengths in one unit: samples, or tokens of seq_length to the sample
    unit = 1 if train.batch_ramp_tokens is None else config.data.seq_length
    length = train.batch_ramp_samples or train.batch_ramp_tokens or 0
    for index, size in enumerate(sizes):
        left = length * (index + 1) - sample * unit * len(sizes)
        if left <= 0:
            continue
        yield Stage(step, sample, size)
        steps = -(-left // (len(sizes) * size * unit))
        step, sample = step + steps, sample + steps * size
    yield Stage(step, sample, train.global_batch)
