"""The learning rate as a pure function of the step index: no state to save or to advance twice.

Convention. `step` is 0 for the first update of a run and counts every attempted update, skipped
ones included. During warm-up the rate is `lr * (step + 1) / warmup_steps`: the first update is
never wasted on a rate of 0, and update `warmup_steps - 1` has the full rate. Afterwards, with
`progress = (step - warmup_steps) / (horizon - warmup_steps)` clamped to [0, 1] and `horizon` the
`decay_steps` (or the run's total), the rate falls from `lr` at progress 0 to `min_lr` at step
`horizon`, and stays there. The last update of a run (`horizon - 1`) is thus just above `min_lr`.
"""

from __future__ import annotations

import math

from megalite.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Rate of update `step` (from 0) in a run of `total_steps` updates."""
    assert step >= 0, f"step {step} is negative"
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    horizon = total_steps if config.decay_steps is None else config.decay_steps
    return config.min_lr + (config.lr - config.min_lr) * _remaining(step, config, horizon)


def _remaining(step: int, config: OptimizerConfig, horizon: int) -> float:
    """Share of the way from `min_lr` up to `lr` that is left, in [0, 1]."""
    if step >= horizon:
        return 0.0
    progress = (step - config.warmup_steps) / (horizon - config.warmup_steps)
    if config.lr_schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
