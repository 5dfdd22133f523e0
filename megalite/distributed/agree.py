"""Agreement of the ranks: work that all of them do or none, and equal configs.

A rank that stops at a missing file would leave the others waiting; one rank with another learning
rate, or a stale file on one node, would silently train to wrong numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from megalite.config import RunConfig, Section
from megalite.config.names import keys, value_of
from megalite.distributed import comm
from megalite.distributed.mesh import Axis, Mesh
from megalite.errors import CheckpointError, ConfigError, MegaliteError

T = TypeVar("T")

_MOST_DIFFERENCES = 8  # lines of an error
_MOST_FAILURES = 3  # different ones in one message


class PeerFailedError(MegaliteError):
    """Another rank met an error and reports it; this rank only ends because of it."""

    of_peer = True


class Ranks:
    """The ranks that do something together: those of an axis, or (None) this process alone.

    All of them make each call. Values are anything JSON can hold.
    """

    def __init__(self, axis: Axis | None = None) -> None:
        self._axis = axis if axis is not None and axis.size > 1 else None
        self.rank = 0 if self._axis is None else self._axis.rank
        self.size = 1 if self._axis is None else self._axis.size

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is on one."""
        if self._axis is None:
            return flag
        mine = torch.tensor([int(flag)], dtype=torch.int64, device=self._axis.device)
        return bool(comm.all_reduce(mine, self._axis, op="max"))

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value in rank order on rank 0; an empty list elsewhere."""
        return [value] if self._axis is None else comm.gather_object(value, self._axis)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return value if self._axis is None else comm.broadcast_object(value, self._axis)


ALONE = Ranks()  # this process, for work that has no mesh


def on_all_ranks(ranks: Ranks, work: Callable[[], T], doing: str = "") -> T:
    """Run `work` on every rank and return its result here, if it raised on no rank.

    All ranks must call it, and if `work` raises on one, all raise at once: a CheckpointError with
    the same text, "DOING: ...", where a checkpoint is what they are doing. Otherwise a rank on
    which it raised raises that error, and the others PeerFailedError.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # of any kind: the other ranks would wait for this one
        failure = error
    if not ranks.any(failure is not None):
        return result

    # What went wrong travels only now: a flag is enough as long as nothing does.
    problem: str = ranks.broadcast(_summary(ranks.gather(_describe(failure))))
    if doing:
        raise CheckpointError(f"{doing}: {problem}") from failure
    if failure is not None:
        raise failure
    raise PeerFailedError(problem)


def on_first_rank(ranks: Ranks, work: Callable[[], T], doing: str = "") -> T:
    """Run `work` on rank 0 only; return its result on all ranks, or raise as `on_all_ranks`.

    The result must be something JSON can hold.
    """
    mine = on_all_ranks(ranks, (lambda: work() if ranks.rank == 0 else None), doing)
    return cast(T, ranks.broadcast(mine))


def _describe(failure: Exception | None) -> str:
    """A rank's report: "" for success."""
    if failure is None or isinstance(failure, CheckpointError):
        return str(failure or "")
    return f"{type(failure).__name__}: {failure}"


def _summary(reports: list[str]) -> str:
    """All ranks' reports in one line: equal ones once, at most three different ones."""
    failed: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report:
            failed.setdefault(report, []).append(rank)
    if len(reports) == 1:
        return "".join(failed)
    parts = [f"{_rank_text(ranks)}: {text}" for text, ranks in failed.items()][:_MOST_FAILURES]
    if len(failed) > _MOST_FAILURES:
        parts.append(f"and {len(failed) - _MOST_FAILURES} other failures")
    return "; ".join(parts)


def _rank_text(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{more}"


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
