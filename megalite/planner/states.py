"""Bytes of a pipeline rank's weights, gradients and optimizer state, padding included.

The buckets are laid out by the same arithmetic as the optimizer's, so the figures are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config import OptimizerConfig, RunConfig
from megalite.layout.bucket_plan import ROUNDED_IN_FLIGHT, plan_chunk
from megalite.layout.topology import Topology
from megalite.run.parameters import ModelStage, stage_parameters
from megalite.run.rules import bucket_item, rule_of

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of an element


def sum_bytes(dtype: str) -> int:
    """Bytes of an element of the tensors that sum: main gradients, masters, norms' statistics."""
    return 8 if dtype == "float64" else 4


@dataclass(frozen=True)
class States:
    """Bytes on one rank.

    optimizer: masters, moments and an average of the weights. sent: at most, copies of gradients
    while they are sent in a narrower type.
    """

    num_parameters: int
    weights: int
    gradients: int
    optimizer: int
    sent: int


def rank_states(config: RunConfig, chunks: Sequence[ModelStage]) -> States:
    """The states of a rank that holds `chunks`; the config must be resolved."""
    each = [_chunk_states(config, chunk) for chunk in chunks]
    return States(
        sum(s.num_parameters for s in each),
        sum(s.weights for s in each),
        sum(s.gradients for s in each),
        sum(s.optimizer for s in each),
        sum(s.sent for s in each),
    )


def _chunk_states(config: RunConfig, chunk: ModelStage) -> States:
    optimizer, parallel = config.optimizer, config.parallel
    assert parallel.dp is not None, "a resolved config has the number of replicas"
    topology, sharded = Topology.of(parallel), optimizer.zero == 1
    width, wide = BYTES[config.train.dtype], sum_bytes(config.train.dtype)

    # Buckets as the optimizer makes them, in the order in which backward finishes parameters.
    specs = list(reversed(stage_parameters(config.model, chunk, parallel.sequence_parallel)))
    items = [bucket_item(spec, rule_of(spec, optimizer), topology, sharded) for spec in specs]
    plans = plan_chunk(items, int(optimizer.bucket_mb * 2**20) // wide)

    # AdamW has two moments of an element, Muon one; a rank has them for the elements it owns.
    stored = plans[-1].stop if plans else 0
    beside = wide * ((width != wide) + (optimizer.ema_decay is not None))
    moment, owned_bytes = moment_bytes(optimizer, wide), 0
    for plan in plans:
        owned = (plan.stop - plan.start) // items[plan.items[0]].num_owners
        owned_bytes += owned * (beside + moment * (1 if plan.whole else 2))
    num_parameters = sum(item.numel for item in items)
    sent = 0
    if optimizer.grad_reduce_dtype != "float32" and parallel.dp > 1:
        # One copy to send and one to receive; ZeRO-0 gathers the sums of as many buckets more.
        copies = ROUNDED_IN_FLIGHT * (2 if sharded else 4)
        longest = max((plan.stop - plan.start for plan in plans), default=0)
        sent = copies * longest * BYTES[optimizer.grad_reduce_dtype]
    return States(num_parameters, width * stored, wide * stored, owned_bytes, sent)


def moment_bytes(optimizer: OptimizerConfig, wide: int) -> int:
    """Bytes of an element of a moment; "float32" stands for the main gradients' type."""
    return wide if optimizer.moment_dtype == "float32" else BYTES[optimizer.moment_dtype]
