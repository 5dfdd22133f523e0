"""The choice of the checkpoints of a run that stay, by step. Deletes nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from megalite.config.schema import CheckpointConfig


def kept_steps(
    settings: CheckpointConfig, steps: Collection[int], losses: Mapping[int, float]
) -> set[int]:
    """The steps of `steps` whose checkpoints stay: newest, first of each keep_every, and best.

    losses: of the validation set `keep_best`, by step; the first of equal ones is the best.
    """
    ordered = sorted(steps)
    kept = set(ordered[-settings.keep :])
    if settings.keep_every:
        newest_first = reversed(ordered)
        firsts = {step // settings.keep_every: step for step in newest_first}
        kept |= {step for part, step in firsts.items() if part > 0}
    rated = [(losses[s], s) for s in ordered if s in losses and math.isfinite(losses[s])]
    if settings.keep_best is not None and rated:
        kept.add(min(rated)[1])
    return kept


def most_kept(settings: CheckpointConfig, total_steps: int) -> int:
    """The most checkpoints that stay over a run of so many steps."""
    every = total_steps // settings.keep_every if settings.keep_every else 0
    return settings.keep + every + (settings.keep_best is not None)
