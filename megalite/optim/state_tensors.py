"""The optimizer's state as named tensors for checkpoints, and its bytes. Reads and writes no files.

Kinds of state: `param` (the weight: fp32 master for 16-bit parameters, else the parameter itself),
then `exp_avg` and `exp_avg_sq` (AdamW) or `momentum` (Muon), and `ema`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from megalite.distributed.mesh import Mesh
from megalite.layout.sharding import ShardSpec
from megalite.optim.buffers import ChunkBuffers
from megalite.optim.shard import EMA, ChunkShard, Piece


@dataclass(frozen=True)
class StateTensor:
    """One rank's part of one state: [start, stop) of this rank's block, flat and row-major.

    `tensor` is a 1-D view of the live state: copying into it loads. `owner` is true on exactly
    one of the ranks that hold these numbers: that one saves; every rank loads.
    """

    kind: str
    spec: ShardSpec
    start: int
    stop: int
    tensor: Tensor
    owner: bool

    @property
    def name(self) -> str:
        """Name of the whole tensor in checkpoints."""
        return f"{self.kind}/{self.spec.name}"


def owns(spec: ShardSpec, mesh: Mesh, zero: int) -> bool:
    """True if this rank counts its part of a parameter in norms and saves it; replicas do not."""
    holds_block = spec.cut_dim is not None or mesh.axis(spec.grid.cut_axis).rank == 0
    is_replica = zero == 0 and mesh.axis(spec.grid.replica_axis).rank != 0
    return holds_block and not is_replica and spec.counted


def state_tensors(pieces: Iterable[Piece], mesh: Mesh, zero: int) -> list[StateTensor]:
    """The states of all pieces, kind by kind within each piece."""
    states: list[StateTensor] = []
    for p in pieces:
        owner = owns(p.spec, mesh, zero)
        for kind, tensor in {"param": p.weight, **p.states}.items():
            states.append(StateTensor(kind, p.spec, p.start, p.stop, tensor, owner))
    return states


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of this rank's weights, gradients and optimizer state, counted from real tensors.

    With 16-bit parameters and ZeRO-1 over D ranks, `total_bytes` is `bytes_per_parameter`, 6 +
    12 / D, times (`num_parameters` + `num_padding`). bf16 moments make it 6 + 8 / D, an average of
    the weights adds 4 / D, a matrix that Muon updates takes 4 / D less (2 / D less in bf16).
    `num_*` are elements of this rank's chunks.
    """

    num_parameters: int
    num_padding: int
    param_bytes: int
    grad_bytes: int
    master_bytes: int
    exp_avg_bytes: int
    exp_avg_sq_bytes: int
    momentum_bytes: int = 0
    ema_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Masters, moments and averages, which ZeRO shards."""
        moments = self.exp_avg_bytes + self.exp_avg_sq_bytes + self.momentum_bytes
        return self.master_bytes + moments + self.ema_bytes

    @property
    def total_bytes(self) -> int:
        return self.param_bytes + self.grad_bytes + self.state_bytes

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of this rank for each element of its chunks, padding included."""
        numel = self.num_parameters + self.num_padding
        return self.total_bytes / numel if numel else 0.0

    @property
    def padding_bytes(self) -> float:
        """The padding's share of `total_bytes`; an average, as shards hold unequal padding."""
        numel = self.num_parameters + self.num_padding
        return self.total_bytes * self.num_padding / numel if numel else 0.0


def memory_report(buffers: list[ChunkBuffers], shards: list[ChunkShard]) -> MemoryReport:
    """Count the storage behind the buffers of all chunks of this rank."""

    def state_bytes(kind: str) -> int:
        return _storage_bytes(s.states[kind] for s in shards if kind in s.states)

    return MemoryReport(
        num_parameters=sum(b.num_parameters for b in buffers),
        num_padding=sum(b.padding for b in buffers),
        param_bytes=_storage_bytes(b.params for b in buffers),
        grad_bytes=_storage_bytes(b.grads for b in buffers),
        master_bytes=_storage_bytes(s.master for s in shards if s.master is not None),
        exp_avg_bytes=state_bytes("exp_avg"),
        exp_avg_sq_bytes=state_bytes("exp_avg_sq"),
        momentum_bytes=state_bytes("momentum"),
        ema_bytes=state_bytes(EMA),
    )


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
