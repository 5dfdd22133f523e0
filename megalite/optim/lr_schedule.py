"""The learning rate as a pure function of the step index: no state to save or to advance twice.

Convention. `step` is 0 for the first update of a run and counts every attempted update, skipped
ones included. Positions are counted in steps, or in tokens as soon as one length is given in
tokens (`lr_phases`); an update lies between the position before it and the position after it.

* Warm-up: `lr * after / warmup`. The first update is never wasted on a rate of 0, and the update
  that completes the warm-up has the full rate.
* constant: `lr`.
* linear, cosine: with `progress = (before - warmup) / (end - warmup)` the rate falls from `lr` at
  progress 0 to `min_lr` at the end, and stays there. The end is `decay_steps` (`decay_tokens`) or
  the run's; the last update of a run is thus just above `min_lr`.
* inverse_sqrt: `lr * sqrt(warmup / after)`, never below `min_lr`; it has no end
  (Vaswani et al. 2017, without the model-size factor).
* wsd (warm-up, stable, decay; Hu et al. 2024, MiniCPM): `lr` until `wsd_decay_steps` before the
  end, then down to `min_lr` at the end, linearly, as a cosine, or as `1 - sqrt(progress)`
  (Haegele et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megalite.config import OptimizerConfig
from megalite.run.lr_phases import LrPhases, lr_phases

# Share of the way from `min_lr` up to `lr` that is left, for a progress in [0, 1].
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


def learning_rate(
    step: int,
    config: OptimizerConfig,
    total_steps: int,
    tokens_before: Callable[[int], int] | None = None,
) -> float:
    """Rate of update `step` (from 0) in a run of `total_steps` updates.

    `tokens_before(step)`: tokens consumed before a step; needed when a length is given in tokens.
    """
    assert step >= 0, f"step {step} is negative"
    phases = lr_phases(config, total_steps, tokens_before)
    before, after = step, step + 1
    if phases.unit == "tokens" and tokens_before is not None:
        before, after = tokens_before(step), tokens_before(step + 1)
    return _rate(config, phases, before, after)


def _rate(config: OptimizerConfig, phases: LrPhases, before: int, after: int) -> float:
    if after < phases.warmup:
        return config.lr * after / phases.warmup
    if config.lr_schedule == "constant" or before < phases.decay_start:
        return config.lr
    if config.lr_schedule == "inverse_sqrt":
        rate = config.lr * math.sqrt(phases.warmup / after)
        return min(config.lr, max(config.min_lr, rate))
    if before >= phases.end:
        return config.min_lr
    shape = config.wsd_decay_shape if config.lr_schedule == "wsd" else config.lr_schedule
    progress = (before - phases.decay_start) / (phases.end - phases.decay_start)
    return config.min_lr + (config.lr - config.min_lr) * _SHAPES[shape](progress)
