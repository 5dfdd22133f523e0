"""Which algorithm, rate and decay each parameter has: one rule a parameter, from its name.

Without groups every parameter has the schedule's rate, 1-D parameters no decay, and under Muon the
hidden matrices (`spec.matrices`) go to Muon. `optimizer.groups` are the exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch

from megalite.config import GroupConfig, OptimizerConfig
from megalite.distributed import comm
from megalite.distributed.mesh import Axis
from megalite.errors import ConfigError
from megalite.sharding import ShardSpec

_SHOWN = 24  # names listed in an error


@dataclass(frozen=True)
class Rule:
    """How one parameter is updated; `lr_scale` multiplies the schedule's rate."""

    algorithm: Literal["adamw", "muon"] = "adamw"
    lr_scale: float = 1.0
    weight_decay: float = 0.0


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


def require_matches(
    groups: Sequence[GroupConfig], names: Sequence[str], world: Axis, device: torch.device
) -> None:
    """ConfigError on every rank unless each group matches a parameter of some rank.

    `names` are this rank's parameters. All ranks call it.
    """
    if not groups:
        return
    mine = [float(any(fnmatchcase(name, group.match) for name in names)) for group in groups]
    found = comm.all_reduce(torch.tensor(mine, device=device), world, op="max").tolist()
    lost = [group.match for group, hit in zip(groups, found, strict=True) if not hit]
    if not lost:
        return
    everyone = comm.all_gather_object(sorted({_layerless(name) for name in names}), world)
    known = sorted({name for rank in everyone for name in rank})
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    raise ConfigError(
        [
            f"optimizer.groups match={match!r} names no parameter; remove the group or match one "
            f"of {', '.join(known[:_SHOWN])}{more} (N: any number)"
            for match in lost
        ]
    )


def _layerless(name: str) -> str:
    """A name with its numbers as N, so that all layers are one line."""
    return re.sub(r"\b\d+\b", "N", name)
