"""The optimizer's rule for each parameter: algorithm, learning rate and decay, from its name.

Without groups every parameter has the schedule's rate, 1-D parameters no decay, and under Muon the
hidden matrices (`spec.matrices`) are updated by Muon and all others by AdamW. `optimizer.groups`
are the exceptions. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal

from megalite.config import OptimizerConfig
from megalite.layout.bucket_plan import BucketItem
from megalite.layout.sharding import ShardSpec
from megalite.layout.topology import Topology


@dataclass(frozen=True)
class Rule:
    """The update of one parameter; `lr_scale` multiplies the schedule's rate."""

    algorithm: Literal["adamw", "muon"] = "adamw"
    lr_scale: float = 1.0
    weight_decay: float = 0.0


def bucket_item(spec: ShardSpec, rule: Rule, topology: Topology, sharded: bool) -> BucketItem:
    """A parameter's bucket item, for optimizer and planner; `sharded`: ZeRO-1 spreads its state."""
    numel = prod(spec.local_shape(topology.size(spec.grid.cut_axis)))
    replicas = topology.size(spec.grid.replica_axis)
    owners = replicas if sharded else 1
    is_whole = rule.algorithm == "muon"
    return BucketItem(numel, spec.grid, replicas, owners, tied=spec.tied, whole=is_whole)


def rule_of(spec: ShardSpec, config: OptimizerConfig) -> Rule:
    """The rule of one parameter: defaults, then every group that matches its name, in order.

    A tied weight has one name, so its copies have one rule.
    """
    muon = config.name == "muon" and spec.matrices is not None
    algorithm: Literal["adamw", "muon"] = "muon" if muon else "adamw"
    lr_scale, weight_decay = 1.0, config.weight_decay if spec.decay else 0.0
    for group in config.groups:
        if fnmatchcase(spec.name, group.match):
            algorithm = group.algorithm or algorithm
            lr_scale = lr_scale if group.lr_scale is None else group.lr_scale
            weight_decay = weight_decay if group.weight_decay is None else group.weight_decay
    return Rule(algorithm, lr_scale, weight_decay)
