"""The exchanges between ranks that checkpoints need, and errors that all ranks raise alike.

`Ranks` is the interface that saving and loading use; `SingleRank` is one process, `GroupRanks` a
torch process group. Messages are bytes (JSON, never pickled objects).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from megalite.errors import CheckpointError

T = TypeVar("T")
_MAX_NAMED = 3  # different failures in one message


class Ranks(Protocol):
    """The ranks that save or load one checkpoint together; all of them make each call."""

    @property
    def rank(self) -> int:
        """This rank among them; rank 0 writes the manifest."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def gather(self, data: bytes) -> list[bytes]:
        """Everyone's bytes in rank order on rank 0; an empty list elsewhere."""

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""

    def barrier(self) -> None:
        """Return when all ranks have called it."""


class SingleRank:
    """One process on its own."""

    rank = 0
    world_size = 1

    def gather(self, data: bytes) -> list[bytes]:
        """The only rank's bytes."""
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        """The only rank's bytes."""
        return data

    def barrier(self) -> None:
        """Return at once: there is no other rank."""


class GroupRanks:
    """The ranks of a torch process group (None: all ranks); messages are tensors on `device`."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.group = group
        self.device = torch.device(device)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def gather(self, data: bytes) -> list[bytes]:
        """Everyone's bytes in rank order on rank 0; an empty list elsewhere."""
        lengths = self._lengths(len(data))
        if max(lengths) == 0:
            return [b""] * self.world_size if self.rank == 0 else []
        mine = self._message(data, max(lengths))
        everyone = [torch.empty_like(mine) for _ in lengths] if self.rank == 0 else None
        dist.gather(mine, everyone, group=self.group, group_dst=0)
        if everyone is None:
            return []
        return [_to_bytes(m[:n]) for m, n in zip(everyone, lengths, strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""
        length = self._lengths(len(data))[0]
        if length == 0:
            return b""
        message = self._message(data if self.rank == 0 else b"", length)
        dist.broadcast(message, group=self.group, group_src=0)
        return _to_bytes(message)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        dist.barrier(group=self.group)

    def _lengths(self, length: int) -> list[int]:
        """The message lengths of all ranks: torch's collectives need them to allocate."""
        mine = torch.tensor([length], dtype=torch.int64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self.group)
        return [int(n) for n in everyone]

    def _message(self, data: bytes, length: int) -> torch.Tensor:
        """`data` as uint8 [length] on the device, padded with zeros."""
        padded = bytearray(data.ljust(length, b"\0"))
        return torch.frombuffer(padded, dtype=torch.uint8).to(self.device)


def on_all(ranks: Ranks, doing: str, work: Callable[[], T]) -> T:
    """Run `work` on every rank; if it fails on any, raise the same CheckpointError on all.

    `doing` begins the message ("saving step 100"). On the ranks that failed the error has their own
    as its cause. Returns this rank's result.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # of any kind: the other ranks would wait for this one for ever
        failure = error
    reports = ranks.gather(_describe(failure).encode())
    problem = ranks.broadcast(_summary(reports).encode()).decode()
    if problem:
        raise CheckpointError(f"{doing}: {problem}") from failure
    return result


def on_first(ranks: Ranks, doing: str, work: Callable[[], bytes]) -> bytes:
    """Run `work` on rank 0 only; return its bytes on all ranks, or raise its failure on all."""
    mine = on_all(ranks, doing, work if ranks.rank == 0 else lambda: b"")
    return ranks.broadcast(mine)


def _describe(failure: Exception | None) -> str:
    """A rank's report: "" for success."""
    if failure is None:
        return ""
    if isinstance(failure, CheckpointError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"


def _summary(reports: list[bytes]) -> str:
    """All ranks' reports in one line: equal ones once, at most three different ones.

    Empty if no rank failed, and on all ranks but 0, which have no reports.
    """
    failed: dict[str, list[int]] = {}
    for index, report in enumerate(reports):
        if report:
            failed.setdefault(report.decode(), []).append(index)
    if len(reports) == 1:
        return "".join(failed)
    parts = [f"{_rank_text(ranks)}: {text}" for text, ranks in list(failed.items())[:_MAX_NAMED]]
    if len(failed) > _MAX_NAMED:
        parts.append(f"and {len(failed) - _MAX_NAMED} other failures")
    return "; ".join(parts)


def _rank_text(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{more}"


def _to_bytes(message: torch.Tensor) -> bytes:
    return message.cpu().numpy().tobytes()
