"""Equality of the ranks: the same config, and the same content by its digest.

One rank with another learning rate, or a stale file on one node, would silently train to wrong
numbers.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from megalite.config import RunConfig, Section
from megalite.config.names import keys, value_of
from megalite.distributed import comm
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError

_MOST_DIFFERENCES = 8  # lines of an error


def all_equal(digest: str, mesh: Mesh) -> bool:
    """True on every rank if all ranks of the world have the same hex digest; all must call it."""
    mine = int(digest[:15], 16)  # 60 bits: fits int64, also when negated
    # The maximum of -x over the ranks is -(minimum of x), so one all-reduce finds the largest and
    # the smallest digest, and all are equal exactly where these two are.
    extremes = torch.tensor([mine, -mine], dtype=torch.int64, device=mesh.device)
    comm.all_reduce(extremes, mesh.world, op="max")
    largest, smallest = int(extremes[0]), -int(extremes[1])
    return largest == smallest


def require_same_config(
    config: RunConfig, mesh: Mesh, accept: frozenset[str] = frozenset()
) -> None:
    """Raise ConfigError on every rank, naming rank and setting, unless all configs are equal.

    The settings that the ranks `accept` as changed (`--accept`) must be equal, too. All ranks must
    call it.
    """
    # Through JSON, so that values compare as they will after a broadcast: tuples become lists.
    settings: dict[str, Any] = json.loads(
        json.dumps({n: value_of(config, n) for n in keys()}, default=Section.model_dump)
    )
    settings["--accept"] = ",".join(sorted(accept)) or None
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    if all_equal(digest, mesh):
        return

    # From here on every rank takes part in the same two collectives, whether it differs or not.
    first: dict[str, Any] = comm.broadcast_object(settings, mesh.world)
    mine = [
        f"rank {mesh.rank} has {name}={settings[name]!r}, rank 0 has {first[name]!r}"
        for name in settings
        if settings[name] != first[name]
    ]
    everyone = comm.all_gather_object(mine, mesh.world)
    lines = [line for lines in everyone for line in lines]

    # A config that differs throughout would otherwise print a line for each setting and rank.
    problems = lines[:_MOST_DIFFERENCES]
    if len(lines) > _MOST_DIFFERENCES:
        problems.append(f"and {len(lines) - _MOST_DIFFERENCES} more such differences")
    raise ConfigError([*problems, "start every rank with the same config"])
