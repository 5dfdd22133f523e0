"""Agreement of the ranks: work that all of them do or none.

A rank that stops at a missing file would leave the others waiting. Torch is imported only where
there are others, so that a process alone can read checkpoints' descriptions without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megalite.errors import CheckpointError, MegaliteError
from megalite.wording import number_of

if TYPE_CHECKING:
    from megalite.distributed.mesh import Axis

T = TypeVar("T")

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
        import torch

        from megalite.distributed import comm

        mine = torch.tensor([int(flag)], dtype=torch.int64, device=self._axis.device)
        return bool(comm.all_reduce(mine, self._axis, op="max"))

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value in rank order on rank 0; an empty list elsewhere."""
        if self._axis is None:
            return [value]
        from megalite.distributed import comm

        return comm.gather_object(value, self._axis)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self._axis is None:
            return value
        from megalite.distributed import comm

        return comm.broadcast_object(value, self._axis)


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
        parts.append(f"and {number_of(len(failed) - _MOST_FAILURES, 'other failure')}")
    return "; ".join(parts)


def _rank_text(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{more}"
