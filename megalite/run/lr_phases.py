"""Warm-up, plateau and decay of the learning rate as positions in one unit: steps or tokens.

The unit is tokens as soon as one length is given in tokens; lengths in steps are then converted to
the tokens of the run's batches. Knows no rates (optim/lr_schedule.py does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megalite.config import OptimizerConfig


@dataclass(frozen=True)
class LrPhases:
    """Ends of the phases, counted from the start of the run.

    Warm-up is [0, warmup), the plateau [warmup, decay_start), the decay [decay_start, end).
    """

    unit: str  # "steps" or "tokens"
    warmup: int
    decay_start: int
    end: int
    run: int  # end of the run


def lr_phases(
    config: OptimizerConfig, total_steps: int, tokens_before: Callable[[int], int] | None = None
) -> LrPhases:
    """The phases of a run of `total_steps`.

    `tokens_before(step)` is the number of tokens before a step; needed if a length is in tokens.
    """
    unit = "tokens" if counts_tokens(config) else "steps"
    assert unit == "steps" or tokens_before is not None, "a length in tokens needs their count"

    def position(step: int) -> int:
        return step if unit == "steps" or tokens_before is None else tokens_before(step)

    end_steps = total_steps if config.decay_steps is None else config.decay_steps
    end = config.decay_tokens or position(end_steps)
    warmup = config.warmup_tokens or position(config.warmup_steps)
    start = warmup
    if config.lr_schedule == "wsd":
        last = config.wsd_decay_steps or 0
        start = position(max(0, end_steps - last))
        if config.wsd_decay_tokens is not None:
            start = max(0, end - config.wsd_decay_tokens)
    return LrPhases(unit, warmup, start, end, position(total_steps))


def counts_tokens(config: OptimizerConfig) -> bool:
    """True if any length is given in tokens."""
    given = (config.warmup_tokens, config.decay_tokens, config.wsd_decay_tokens)
    return any(tokens is not None for tokens in given)
