"""The ranks of a layout on its axes: pure arithmetic, for any world size.

`rank = tp + TP*(cp + CP*(dp + DP*pp))`: tp varies fastest, so that a tensor-parallel group
stays in one node, and pp slowest, so that a pipeline crosses nodes. The ranks of a pipeline stage
are numbered a second time for experts, `ep + EP*edp`: ep varies fastest, so that tokens reach their
experts within a node, too. `megalite.distributed.mesh` makes communicators from these rank lists.

An axis is a row of `_GRIDS`, a size of `Topology` and its groups in `_VARYING`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Literal, get_args

from megalite.config import ParallelConfig
from megalite.errors import ConfigError
from megalite.wording import number_of

# Each grid numbers all ranks by axes, fastest first.
_GRIDS: tuple[tuple[str, ...], ...] = (("tp", "cp", "dp", "pp"), ("ep", "edp", "pp"))

Kind = Literal["tp", "cp", "dp", "pp", "dp_cp", "embedding", "world", "edge", "ep", "edp"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# The axes that vary inside a group of the kind, fastest first (the order of ranks in the group).
_VARYING: dict[Kind, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("cp", "dp"),
    "embedding": ("pp",),
    "world": ("tp", "cp", "dp", "pp"),
    "edge": ("tp", "cp", "dp", "pp"),  # what all ranks agree on between two steps
    "ep": ("ep",),
    "edp": ("edp",),
}


@dataclass(frozen=True)
class Coords:
    """One rank's coordinate on every axis, each counted from 0."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0
    ep: int = 0
    edp: int = 0


@dataclass(frozen=True)
class Topology:
    """A layout: the number of ranks on each axis, at least 1.

    ep divides tp x cp x dp, the ranks of a stage; edp is the quotient. Raises `ConfigError` for
    other sizes.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"parallel.{axis}={size!r} must be a whole number of at least 1"
            for axis, size in vars(self).items()
            if isinstance(size, bool) or not isinstance(size, int) or size < 1
        ]
        if not problems and self.world_size // self.pp % self.ep:
            problems.append(
                f"parallel.ep={self.ep} does not divide tp*cp*dp = {self.tp}*{self.cp}*{self.dp} = "
                f"{self.world_size // self.pp}, the ranks of a pipeline stage; use a divisor"
            )
        if problems:
            raise ConfigError(problems)

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int | None = None) -> Topology:
        """The layout that the settings describe.

        Where parallel.dp is open: as many replicas as `world_size` has room for, at least 1.
        """
        replica = cls(tp=parallel.tp, pp=parallel.pp)
        dp = parallel.dp or max(1, (world_size or 0) // replica.world_size)
        return replace(replica, dp=dp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    @property
    def edp(self) -> int:
        """Number of ranks of a stage that hold the same experts."""
        return self.world_size // (self.pp * self.ep)

    def size(self, kind: Kind) -> int:
        """Number of ranks in a group of `kind`; a middle stage's embedding group has 1 instead."""
        if kind == "embedding":
            return min(2, self.pp)
        return prod(getattr(self, axis) for axis in self._varying(kind))

    @property
    def sizes(self) -> dict[str, int]:
        """Size by axis, for the axes whose product is the world size."""
        return {axis: getattr(self, axis) for axis in _GRIDS[0]}

    def require_world(self, world_size: int) -> None:
        """Raise `ConfigError` unless exactly `world_size` ranks make this layout."""
        if world_size == self.world_size:
            return
        model = self.world_size // self.dp
        fits = (
            f"parallel.dp={world_size // model} would fit"
            if world_size % model == 0 and world_size > 0
            else f"the number of ranks must be a multiple of tp*cp*pp = {model}"
        )
        raise ConfigError(
            f"the layout tp={self.tp} cp={self.cp} dp={self.dp} pp={self.pp} needs "
            f"{number_of(self.world_size, 'rank')}, but {world_size} were started; {fits}"
        )

    def coords(self, rank: int) -> Coords:
        """The coordinates of world rank `rank`; `ConfigError` if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank {rank} does not exist in a world of {number_of(self.world_size, 'rank')}; "
                f"ranks are 0 to {self.world_size - 1}"
            )
        places: dict[str, int] = {}
        for axes in _GRIDS:
            rest = rank
            for axis in axes:
                rest, places[axis] = divmod(rest, getattr(self, axis))
        return Coords(**places)

    def group_of(self, kind: Kind, rank: int) -> tuple[int, ...]:
        """Ranks of the group of `kind` that `rank` belongs to, ascending, in O(group size).

        A rank of a middle stage belongs to no embedding group: its group is itself alone.
        """
        at = self.coords(rank)
        if kind == "embedding" and at.pp not in (0, self.pp - 1):
            return (rank,)
        base = rank - sum(getattr(at, axis) * self._stride(axis) for axis in self._varying(kind))
        return tuple(base + offset for offset in self._offsets(kind))

    def groups(self, kind: Kind) -> list[tuple[int, ...]]:
        """Every group of `kind`, ordered by its lowest rank.

        Each rank is in exactly one group; only middle-stage ranks are in no embedding group.
        """
        varying = self._varying(kind)
        grid = _grid_of(varying[0])
        fixed = [axis for axis in reversed(grid) if axis not in varying]
        offsets = self._offsets(kind)
        bases = product(
            *(range(0, self._stride(a) * getattr(self, a), self._stride(a)) for a in fixed)
        )
        return [tuple(base + offset for offset in offsets) for base in map(sum, bases)]

    def has_embedding(self, rank: int) -> bool:
        """True if `rank` is on the first or last stage, which hold the tied embedding."""
        return self.coords(rank).pp in (0, self.pp - 1)

    def describe(self, rank: int) -> str:
        """A rank with its coordinates as text, without axes of size 1: `rank 3 (tp 1, pp 1)`."""
        at = self.coords(rank)
        places = [f"{axis} {getattr(at, axis)}" for axis, size in vars(self).items() if size > 1]
        return f"rank {rank} ({', '.join(places)})" if places else f"rank {rank}"

    def _varying(self, kind: Kind) -> tuple[str, ...]:
        if kind not in _VARYING:
            raise ConfigError(f"no group kind {kind!r}; kinds are {', '.join(KINDS)}")
        return _VARYING[kind]

    def _stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on `axis`."""
        grid = _grid_of(axis)
        return prod(getattr(self, faster) for faster in grid[: grid.index(axis)])

    def _offsets(self, kind: Kind) -> list[int]:
        """Rank offsets of a group's members from its lowest member, ascending."""
        if kind == "embedding":
            last = self._stride("pp") * (self.pp - 1)
            return [0, last] if last else [0]
        offsets = [0]
        for axis in self._varying(kind):  # fastest first, so the result stays ascending
            stride = self._stride(axis)
            offsets = [step * stride + o for step in range(getattr(self, axis)) for o in offsets]
        return offsets


def _grid_of(axis: str) -> tuple[str, ...]:
    """The first grid that has an axis: pp has the same stride in all of them."""
    return next(grid for grid in _GRIDS if axis in grid)
