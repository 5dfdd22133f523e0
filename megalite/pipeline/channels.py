"""Point-to-point transfers between pipeline ranks: one communicator per directed edge, no tags.

Reading order: `Channels` (send, post a receive, finish), then `require_same_program` (checked
before the first message, since a receive of the wrong size would abort the process or fill only a
part of the buffer without an error). The order of messages is the program's.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from megalite.distributed.comm import Handle, all_gather_object, irecv, isend
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError
from megalite.pipeline.chunk import BoundarySpec
from megalite.schedules import Schedule

# Most sends in flight. On gloo a send is done only after a wait for it, so with more of them the
# oldest is waited for. That cannot deadlock: programs are checked with sends that block.
_MAX_SENDS = 32

Edge = tuple[int, int]  # sending pipeline rank, receiving pipeline rank


class Channels:
    """This pipeline rank's ends of the channels over which boundary tensors travel."""

    def __init__(self, mesh: Mesh, boundary: BoundarySpec) -> None:
        self._mesh = mesh
        self._boundary = boundary
        self._sends: deque[Handle] = deque()

    def open(self, edges: list[Edge]) -> None:
        """Make the communicators and pass one element over each, in the same order on all ranks.

        Otherwise they would be set up at their first use, in an order that depends on timing.
        """
        if edges:
            self._mesh.create("channels")
        for edge in edges:
            if self._mesh.pp.rank in edge:
                start = isend if self._mesh.pp.rank == edge[0] else irecv
                start(torch.zeros(1, device=self._mesh.device), self._mesh, *edge).wait()

    def send(self, tensor: Tensor, peer_pp: int) -> None:
        """Start sending to a pipeline rank; the storage is kept until the send is done."""
        while self._sends and (self._sends[0].done() or len(self._sends) == _MAX_SENDS):
            self._sends.popleft().wait()
        self._sends.append(isend(tensor, self._mesh, self._mesh.pp.rank, peer_pp))

    def receive(self, peer_pp: int) -> Handle:
        """Post a receive from a pipeline rank into a buffer of its own, the handle's result."""
        shape, dtype = self._boundary.shape, self._boundary.dtype
        buffer = torch.empty(shape, dtype=dtype, device=self._mesh.device)
        return irecv(buffer, self._mesh, peer_pp, self._mesh.pp.rank)

    def finish(self) -> None:
        """Wait for the sends that are still in flight."""
        while self._sends:
            self._sends.popleft().wait()


def edges_of(schedule: Schedule) -> list[Edge]:
    """The directed channels that a schedule needs, in an order that is the same on all ranks."""
    edges: dict[Edge, None] = {}
    for before, after in zip(schedule.place, schedule.place[1:], strict=False):
        if before != after:
            edges[before, after] = edges[after, before] = None
    return list(edges)


def require_same_program(mesh: Mesh, boundary: BoundarySpec, program: Schedule) -> None:
    """Raise the same ConfigError on all pipeline ranks if their boundaries or programs differ."""
    schedule = f"p={program.p} v={program.v} m={program.m}, sha256 {program.digest[:16]}"
    seen = all_gather_object(f"boundary {boundary}, schedule {schedule}", mesh.pp)
    if any(other != seen[0] for other in seen):
        lines = [f"pipeline rank {pp}: {setup}" for pp, setup in enumerate(seen)]
        raise ConfigError(
            "pipeline ranks were set up differently; start all of them with the same model, "
            "sequence length, micro batch, dtype and schedule:\n" + "\n".join(lines)
        )
