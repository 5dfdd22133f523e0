"""The batch size of each step and its position in the data: pure functions of the step.

The batch may grow in stages, as with Megatron's `--rampup-batch-size`: with `n` stages from
`batch_ramp_start` up by `batch_ramp_increment` to below `global_batch`, stage k holds while fewer
than `(k + 1) / n` of the ramp's samples (or tokens) are consumed. A stage ends at the first end of
a step at or beyond that. A run that is resumed with another batch continues after the samples it
has consumed, so its past stages are part of its plan. Reads no data and knows no ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.config import RunConfig
from megalite.layout.topology import Topology


class BatchStage(NamedTuple):
    """A stage of the batch ramp: steps of `global_batch` samples from `first_step` on.

    `first_sample` is the run's sample at which `first_step` starts.
    """

    first_step: int
    first_sample: int
    global_batch: int


@dataclass(frozen=True)
class BatchPlan:
    """All batch stages of a run, by step; the first starts at step 0, the last has no end."""

    stages: tuple[BatchStage, ...]

    def global_batch(self, step: int) -> int:
        """Samples of `step` (from 0), over all ranks."""
        return self._stage(step).global_batch

    def first_sample(self, step: int) -> int:
        """Number of samples that the steps before `step` consume: the position in the data."""
        stage = self._stage(step)
        return stage.first_sample + (step - stage.first_step) * stage.global_batch

    def steps_for(self, samples: int) -> int:
        """The fewest steps that consume at least so many samples."""
        stage = self.stages[bisect_right(self.stages, samples, key=lambda s: s.first_sample) - 1]
        left = samples - stage.first_sample
        return stage.first_step + -(-left // stage.global_batch)

    def before(self, step: int) -> list[BatchStage]:
        """The stages of the steps before `step`, which a checkpoint at `step` stores."""
        return [stage for stage in self.stages if stage.first_step < step]

    def _stage(self, step: int) -> BatchStage:
        assert step >= 0, f"step {step} is negative"
        return self.stages[bisect_right(self.stages, step, key=lambda s: s.first_step) - 1]


def batch_plan(config: RunConfig, past: Sequence[BatchStage] = (), step: int = 0) -> BatchPlan:
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


def num_micro_batches(config: RunConfig, dp: int | None = None) -> int:
    """Microbatches of each of dp replicas (None: the config's) in a step of the full batch."""
    train, replicas = config.train, dp or Topology.of(config.parallel).dp
    return train.global_batch // (train.micro_batch * replicas)


def ramp_sizes(config: RunConfig) -> list[int]:
    """The batches of the ramp, without the final one; empty where there is no ramp."""
    start, increment = config.train.batch_ramp_start, config.train.batch_ramp_increment
    if start is None or increment is None:
        return []
    return list(range(start, config.train.global_batch, increment))


def _stages(config: RunConfig, step: int, sample: int) -> Iterator[BatchStage]:
    """The stages of a config from (step, sample) on; those that have ended are left out."""
    train = config.train
    sizes = ramp_sizes(config)
    # lengths in one unit: samples, or tokens of seq_length to the sample
    unit = 1 if train.batch_ramp_tokens is None else config.data.seq_length
    length = train.batch_ramp_samples or train.batch_ramp_tokens or 0
    for index, size in enumerate(sizes):
        left = length * (index + 1) - sample * unit * len(sizes)
        if left <= 0:
            continue
        yield BatchStage(step, sample, size)
        steps = -(-left // (len(sizes) * size * unit))
        step, sample = step + steps, sample + steps * size
    yield BatchStage(step, sample, train.global_batch)
