"""The check that each of `optimizer.groups` matches a parameter; run/rules.py applies them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from megalite.config import GroupConfig
from megalite.distributed import comm
from megalite.distributed.mesh import Axis
from megalite.errors import ConfigError

_SHOWN = 24  # names listed in an error


def require_matches(
    groups: Sequence[GroupConfig], names: Sequence[str], world: Axis, device: torch.device
) -> None:
    """Raise ConfigError on every rank unless each group matches a parameter of some rank.

    `names` are this rank's parameters. All ranks call it.
    """
    if not groups:
        return
    mine = [float(any(fnmatchcase(name, group.match) for name in names)) for group in groups]
    found = comm.all_reduce(torch.tensor(mine, device=device), world, op="max").tolist()
    unmatched = [group.match for group, hit in zip(groups, found, strict=True) if not hit]
    if not unmatched:
        return
    everyone = comm.all_gather_object(sorted({_layerless(name) for name in names}), world)
    known = sorted({name for rank in everyone for name in rank})
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    raise ConfigError(
        [
            f"optimizer.groups match={match!r} names no parameter; remove the group or match one "
            f"of {', '.join(known[:_SHOWN])}{more} (N: any number)"
            for match in unmatched
        ]
    )


def _layerless(name: str) -> str:
    """A name with its numbers as N, so that all layers are one line."""
    return re.sub(r"\b\d+\b", "N", name)
