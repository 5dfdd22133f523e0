"""The mesh: this process's place on every axis, and the communicators made from the world's.

It makes groups; it moves no data (comm.py does) and starts no process group (process/env.py does).
Reading order: `Axis`, then `Mesh`.

Groups are made on first use or by `Mesh.create`, always in *rounds*: in one round every rank of the
world takes part in making exactly one group. NCCL needs that because `split_group` splits the world
communicator collectively. gloo needs it because `new_group(use_local_synchronization=True)`, which
only members call, names a group after the *number* of groups its members made before; ranks with
different numbers would wait for each other under different names. A rank that has no group in a
round makes a group of itself alone. So `create` is called once, at set-up, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from megalite.distributed.clock import Clock
from megalite.distributed.ledger import Ledger
from megalite.errors import ConfigError
from megalite.layout.topology import KINDS, Kind, Topology

Members = tuple[int, ...]
GroupKey = tuple[Members, Literal["shared", "edge", "tp"]]
GroupName = Literal[Kind, "channels"]
_EXPERTS = ("ep", "edp")


class Axis:
    """One mesh axis as seen from this process.

    `ranks` are the world ranks of this process's group, in axis order; `rank` is the place of this
    process in them. A rank of a middle stage is no `member` of the embedding axis and sees size 1.
    `device`, `backend` (gloo, nccl, fake, or none for a lone process) and `ledger` are the mesh's.
    """

    def __init__(self, mesh: Mesh, name: Kind) -> None:
        self._mesh = mesh
        self.name: Kind = name
        self.device, self.backend, self.ledger = mesh.device, mesh.backend, mesh.ledger
        self.ranks: Members = mesh.topology.group_of(name, mesh.rank)
        self.ledger.groups[name] = self.ranks
        self.size: int = len(self.ranks)
        self.rank: int = self.ranks.index(mesh.rank)
        self._group: dist.ProcessGroup | None = None
        self.member: bool = name != "embedding" or mesh.topology.has_embedding(mesh.rank)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The communicator, made on first use; None when the size is 1.

        First uses must come in the same order on all ranks; `Mesh.create` sees to that.
        """
        if self.size == 1:
            return None
        if self._group is None:
            self._group = self._mesh.group(self.name)
        return self._group

    @property
    def next_rank(self) -> int:
        """World rank of the next process on the axis; the first follows the last."""
        return self.ranks[(self.rank + 1) % self.size]

    @property
    def previous_rank(self) -> int:
        """World rank of the previous process on the axis; the last precedes the first."""
        return self.ranks[(self.rank - 1) % self.size]

    def __repr__(self) -> str:
        return f"Axis({self.name}, rank {self.rank} of {self.size})"


class Mesh:
    """All axes of one process. Made once and passed; there is no global mesh.

    The process group must have been started (`env.init_process`) unless the world has one rank.
    `timeout_s` bounds every collective of the groups made here. Raises `ConfigError` if the world
    does not have as many ranks as the layout.
    """

    def __init__(
        self,
        topology: Topology,
        device: torch.device | None = None,
        *,
        timeout_s: float = 600.0,
    ) -> None:
        started = dist.is_initialized()
        topology.require_world(dist.get_world_size() if started else 1)
        self.topology = topology
        self.rank: int = dist.get_rank() if started else 0
        self.device: torch.device = torch.device("cpu") if device is None else device
        self.backend: str = dist.get_backend() if started else "none"
        self.ledger = Ledger(topology.describe(self.rank), Clock(self.device))

        self.num_groups_made = 0
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[GroupKey, dist.ProcessGroup | None] = {}  # None: of this rank alone
        self._channels: dict[tuple[int, int], dist.ProcessGroup] | None = None
        if started and topology.world_size > 1:
            self._groups[tuple(range(topology.world_size)), "shared"] = _world_group()

        # Axes only know their ranks; their groups are made on first use or by `create`.
        self.tp = Axis(self, "tp")
        self.cp = Axis(self, "cp")
        self.dp = Axis(self, "dp")
        self.pp = Axis(self, "pp")
        self.dp_cp = Axis(self, "dp_cp")
        self.embedding = Axis(self, "embedding")
        self.world = Axis(self, "world")
        self.edge = Axis(self, "edge")
        self.ep = Axis(self, "ep")
        self.edp = Axis(self, "edp")

    def axis(self, name: Kind) -> Axis:
        """The axis called `name`; `ConfigError` if there is none."""
        if name not in KINDS:
            raise ConfigError(f"no mesh axis {name!r}; axes are {', '.join(KINDS)}")
        return cast(Axis, getattr(self, name))

    def create(self, *names: GroupName) -> None:
        """Make the groups of these axes ("channels": all pipeline channels) now, in this order.

        All ranks must call it with the same names. No names: everything that a model of dense
        layers uses; the axes of experts are made where there are some.
        """
        for name in names or (*(kind for kind in KINDS if kind not in _EXPERTS), "channels"):
            if name == "channels":
                self._make_channels()
            else:
                self._make_axis(name)

    def group(self, name: Kind) -> dist.ProcessGroup | None:
        """Group of an axis of size above 1, made now if need be.

        The embedding axis, which middle stages have no part in, must have been created before.
        """
        key = self._key(self.axis(name))
        if key not in self._groups:
            if name == "embedding":
                raise RuntimeError(
                    "the embedding group is not made on first use, because middle stages never "
                    "use it; call mesh.create('embedding') on all ranks at set-up"
                )
            self._make_axis(name)
        return self._groups[key]

    def _key(self, axis: Axis) -> GroupKey:
        """Axes of the same ranks share a group, but for two.

        The gather of parameters runs on into the next step. The edge of the step, which the host
        waits for, would queue behind it on one communicator. The group of tp is urgent.
        """
        if axis.name == "tp":
            return axis.ranks, "tp"
        own = axis.name == "edge" and axis.ranks == self.dp_cp.ranks
        return axis.ranks, "edge" if own else "shared"

    def channel(self, src_pp: int, dst_pp: int) -> dist.ProcessGroup:
        """The 2-rank group that carries stage `src_pp`'s messages to stage `dst_pp`.

        One group per directed edge between neighbours on the ring of pipeline ranks, within this
        rank's (tp, cp, dp) column, so that no transfer waits behind one the other way. Group ranks
        are in the order of world ranks. `mesh.create("channels")` must have run on all ranks.
        """
        if self._channels is None:
            raise RuntimeError(
                "the pipeline channels are not made yet; call mesh.create('channels') on all "
                "ranks at set-up"
            )
        if (src_pp, dst_pp) not in self._channels:
            mine = ", ".join(f"{src}->{dst}" for src, dst in sorted(self._channels))
            raise ConfigError(
                f"{self.topology.describe(self.rank)} has no channel {src_pp}->{dst_pp}; it has "
                f"{mine or 'none'}: channels join neighbours on the ring of {self.pp.size} "
                "pipeline ranks"
            )
        return self._channels[(src_pp, dst_pp)]

    def channel_peer(self, src_pp: int, dst_pp: int) -> int:
        """World rank at the other end of this rank's channel `src_pp` -> `dst_pp`."""
        other = dst_pp if src_pp == self.pp.rank else src_pp
        return self.pp.ranks[other]

    def _make_axis(self, name: Kind) -> None:
        axis = self.axis(name)
        # Middle stages are no members of the embedding axis, but of the round that makes it.
        has_round = axis.size > 1 or (name == "embedding" and self.topology.pp > 2)
        if has_round and self._key(axis) not in self._groups:
            groups = partial(self.topology.groups, name)
            # Those of tp run beside products that fill the GPU, and would wait for their end.
            made = self._round(groups, axis.ranks, name, urgent=name == "tp")
            assert axis.size == 1 or made is not None, f"rank {self.rank} is in no {name} group"
            self._groups[self._key(axis)] = made

    def _make_channels(self) -> None:
        if self._channels is not None:
            return
        self._channels = {}
        for edges in channel_rounds(self.topology.pp):
            mine = next((edge for edge in edges if self.pp.rank in edge), None)
            ranks = (
                (self.rank,)
                if mine is None
                else tuple(sorted((self.pp.ranks[mine[0]], self.pp.ranks[mine[1]])))
            )
            made = self._round(partial(self._pairs, edges), ranks, "channel")
            if mine is not None and made is not None:
                self._channels[mine] = made

    def _pairs(self, edges: list[tuple[int, int]]) -> list[Members]:
        """The two world ranks of each of these edges in every (tp, cp, dp) column."""
        return [
            tuple(sorted((column[src], column[dst])))
            for column in self.topology.groups("pp")
            for src, dst in edges
        ]

    def _round(
        self,
        groups: Callable[[], list[Members]],
        mine: Members,
        description: str,
        *,
        urgent: bool = False,
    ) -> dist.ProcessGroup | None:
        """Make one group per rank: `groups()` over all ranks, of which `mine` is this rank's.

        Only NCCL's collective split needs to know the others' groups. urgent: on NCCL its kernels
        go before those of computation that were launched but have not begun.
        """
        self.num_groups_made += 1
        if self.backend == "nccl":
            made = dist.split_group(
                split_ranks=[list(ranks) for ranks in groups()],
                timeout=self._timeout,
                pg_options=_high_priority() if urgent else None,
                group_desc=description,
            )
        else:
            made = dist.new_group(
                list(mine),
                timeout=self._timeout,
                use_local_synchronization=True,
                group_desc=description,
            )
        return made if isinstance(made, dist.ProcessGroup) and len(mine) > 1 else None


def channel_rounds(num_pp: int) -> list[list[tuple[int, int]]]:
    """Directed edges (src, dst) of the ring of pipeline ranks, in rounds without a shared rank.

    Covers s -> s+1 and s+1 -> s for every stage, with the edge that closes the ring (virtual
    stages use it); at most 6 rounds, 4 when the number of ranks is even, 2 when it is 2.
    """
    edges = [(s, (s + 1) % num_pp) for s in range(num_pp)] if num_pp > 1 else []
    edges += [(dst, src) for src, dst in edges if (dst, src) not in edges]
    rounds: list[list[tuple[int, int]]] = []
    for edge in edges:
        free = (r for r in rounds if all(not set(edge) & set(other) for other in r))
        chosen = next(free, None)
        if chosen is None:
            rounds.append([edge])
        else:
            chosen.append(edge)
    return rounds


def _high_priority() -> Any:
    """NCCL's options for a group whose stream has a high priority."""
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _world_group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the process group was started"
    return world
