"""The bytes that a run's checkpoints take on disk, and the line that says when it saves."""

from __future__ import annotations

import math

from megalite.config import RunConfig
from megalite.planner.states import moment_bytes, sum_bytes
from megalite.run.parameters import stage_parameters, whole_model
from megalite.run.retention import most_kept
from megalite.run.rules import rule_of


def checkpoint_bytes(config: RunConfig) -> int:
    """Bytes of the tensors of a checkpoint: weights, moments and average of all parameters, once.

    The description beside them (names, places, hashes) is not counted.
    """
    optimizer, wide, total = config.optimizer, sum_bytes(config.train.dtype), 0
    weights = wide * (1 if optimizer.ema_decay is None else 2)
    for spec in stage_parameters(config.model, whole_model(config.model)):
        num_moments = 1 if rule_of(spec, optimizer).algorithm == "muon" else 2
        total += math.prod(spec.shape) * (weights + num_moments * moment_bytes(optimizer, wide))
    return total


def storage_bytes(config: RunConfig, total_steps: int) -> int:
    """The most that a run's checkpoints take at a time: what stays, and one that is written."""
    return (most_kept(config.checkpoint, total_steps) + 1) * checkpoint_bytes(config)


def storage_line(config: RunConfig, total_steps: int) -> str:
    """A line: when a run saves, which checkpoints stay, and the bytes of one and of all."""
    settings = config.checkpoint
    steps = "step" if settings.interval == 1 else f"{settings.interval} steps"
    when = [steps] if settings.interval else []
    when += [_duration(settings.interval_s)] if settings.interval_s else []
    stays = ["all kept" if settings.keep_every == 1 else f"newest {settings.keep} kept"]
    if settings.keep_every > 1:
        stays.append(f"the first of each {settings.keep_every} steps")
    if settings.keep_best is not None:
        stays.append(f"the best by {settings.keep_best}, saved before each evaluation")
    return (
        f"{'every ' if when else ''}{' or '.join(when) or 'at the end and on a signal'}, "
        f"{' + '.join(stays)}; {_size(checkpoint_bytes(config))} each, "
        f"at most {_size(storage_bytes(config, total_steps))} for this run"
    )


def _duration(seconds: float) -> str:
    """Seconds in the largest unit of which they are a whole number."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def _size(num_bytes: float) -> str:
    """Bytes in the decimal units of disks: "96.4 GB"."""
    unit = 0
    while num_bytes >= 999.5 and unit < 5:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB', 'PB')[unit]}"
