"""What the ranks settle together before they train: the same config, and errors that one has.

One rank with another learning rate, or a stale file on one node, would train to wrong numbers
without a word; one that stops at a missing file would leave the others waiting.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megalite.config import RunConfig, Section
from megalite.config.names import keys, value_of
from megalite.distributed import comm
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError, MegaliteError

T = TypeVar("T")


class PeerFailedError(MegaliteError):
    """Another rank met an error, which it tells itself; this one only ends with it."""

    of_peer = True


def together(mesh: Mesh, work: Callable[[], T]) -> T:
    """What `work` returns on this rank, if it raises on none; all ranks call it.

    A rank on which it raises passes that on; the others raise PeerFailedError, at once.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # of any kind: the other ranks would wait for this one
        failure = error
    failed = torch.tensor([0 if failure is None else 1], dtype=torch.int64, device=mesh.device)
    if int(comm.all_reduce(failed, mesh.world, op="max")) == 0:
        return result
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    reports = comm.all_gather_object(text, mesh.world)
    if failure is not None:
        raise failure
    rank, text = next((rank, text) for rank, text in enumerate(reports) if text)
    raise PeerFailedError(f"rank {rank} met an error: {text}")


def all_equal(digest: str, mesh: Mesh) -> bool:
    """Whether every rank of the world has the same hex digest; all ranks call it."""
    mine = int(digest[:15], 16)  # 60 bits
    ends = torch.tensor([mine, -mine], dtype=torch.int64, device=mesh.device)
    comm.all_reduce(ends, mesh.world, op="max")
    return int(ends[0]) == -int(ends[1])


def require_same_config(
    config: RunConfig, mesh: Mesh, accept: frozenset[str] = frozenset()
) -> None:
    """ConfigError on every rank, naming rank and setting, unless all ranks' configs are equal.

    So must be the changes that they accept (`--accept`).
    """
    settings: dict[str, Any] = json.loads(
        json.dumps({n: value_of(config, n) for n in keys()}, default=Section.model_dump)
    )
    settings["--accept"] = ",".join(sorted(accept)) or None
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    if all_equal(digest, mesh):
        return
    first: dict[str, Any] = comm.broadcast_object(settings, mesh.world)
    mine = [
        f"rank {mesh.rank} has {name}={settings[name]!r}, rank 0 has {first[name]!r}"
        for name in settings
        if settings[name] != first[name]
    ]
    everyone = comm.all_gather_object(mine, mesh.world)
    lines = [line for lines in everyone for line in lines]
    more = f"and {len(lines) - 8} more such differences"
    raise ConfigError(
        [*lines[:8], *([more] if len(lines) > 8 else []), "start every rank with the same config"]
    )
