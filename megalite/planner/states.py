"""Bytes of a pipeline rank's weights, gradients and optimizer state, padding included.

The buckets are laid out by the same arithmetic as the optimizer's, so the figures are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from megalite.config import OptimizerConfig, RunConfig
from megalite.layout.bucket_plan import plan_chunk
from megalite.planner.stages import Stage, stage_parameters
from megalite.run.rules import rule_of

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of an element


def sum_bytes(dtype: str) -> int:
    """Of an element of what sums: main gradients, masters, statistics of norms."""
    return 8 if dtype == "float64" else 4


@dataclass(frozen=True)
class States:
    """Bytes on one rank. `optimizer`: masters, moments and an average of the weights."""

    num_parameters: int
    weights: int
    gradients: int
    optimizer: int


def rank_states(config: RunConfig, chunks: Sequence[Stage]) -> States:
    """Of a rank that holds these chunks; `parallel.dp` must be set."""
    each = [_chunk_states(config, chunk) for chunk in chunks]
    return States(
        sum(s.num_parameters for s in each),
        sum(s.weights for s in each),
        sum(s.gradients for s in each),
        sum(s.optimizer for s in each),
    )


def _chunk_states(config: RunConfig, chunk: Stage) -> States:
    optimizer, tp, dp = config.optimizer, config.parallel.tp, config.parallel.dp
    assert dp is not None, "a resolved config says how many replicas there are"
    shards = dp if optimizer.zero == 1 else 1
    specs = list(reversed(stage_parameters(config, chunk)))
    numels = [prod(spec.local_shape(tp)) for spec in specs]
    width, wide = BYTES[config.train.dtype], sum_bytes(config.train.dtype)
    plans = plan_chunk(
        numels,
        [spec.shared for spec in specs],
        [rule_of(spec, optimizer).algorithm == "muon" for spec in specs],
        int(optimizer.bucket_mb * 2**20) // wide,
        dp,
        shards,
    )
    stored = plans[-1].stop if plans else 0
    whole = sum(plan.stop - plan.start for plan in plans if plan.whole)
    owned_bytes = _moment_bytes(optimizer, wide) * (2 * (stored - whole) + whole)
    owned_bytes += wide * stored * ((width != wide) + (optimizer.ema_decay is not None))
    return States(sum(numels), width * stored, wide * stored, owned_bytes // shards)


def _moment_bytes(optimizer: OptimizerConfig, wide: int) -> int:
    """ "float32" means as wide as the main gradients."""
    return wide if optimizer.moment_dtype == "float32" else BYTES[optimizer.moment_dtype]
