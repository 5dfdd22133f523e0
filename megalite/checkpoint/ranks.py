"""The few exchanges a checkpoint needs between ranks, and errors that all ranks agree on.

`Ranks` is what saving and loading ask for; `SingleRank` is one process, `GroupRanks` a torch
process group. Only bytes travel (JSON, never pickled objects).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from megalite.errors import CheckpointError

T = TypeVar("T")
_NAMED_REPORTS = 3


class Ranks(Protocol):
    """The ranks that save or load one checkpoint together; each call is made by all of them."""

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
        """Nobody to wait for."""


class GroupRanks:
    """The ranks of a torch process group (None: all); `device` is where its messages live."""

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
        mine = torch.tensor([length], dtype=torch.int64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self.group)
        return [int(n) for n in everyone]

    def _message(self, data: bytes, length: int) -> torch.Tensor:
        padded = bytearray(data.ljust(length, b"\0"))
        return torch.frombuffer(padded, dtype=torch.uint8).to(self.device)


def together(ranks: Ranks, doing: str, work: Callable[[], T]) -> T:
    """Run `work` on every rank; when it fails on any, raise the same CheckpointError on all.

    `doing` starts the message ("saving step 100"). The failing rank keeps its own error as cause.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # of any kind: the other ranks would wait for this one for ever
        failure = error
    reports = ranks.gather(_say(failure).encode())
    verdict = ranks.broadcast(_summary(reports).encode()).decode()
    if verdict:
        raise CheckpointError(f"{doing}: {verdict}") from failure
    return result


def on_first(ranks: Ranks, doing: str, work: Callable[[], bytes]) -> bytes:
    """Run `work` on rank 0 only and hand its bytes to all; its failure is everyone's."""
    mine = together(ranks, doing, work if ranks.rank == 0 else lambda: b"")
    return ranks.broadcast(mine)


def _say(failure: Exception | None) -> str:
    if failure is None:
        return ""
    if isinstance(failure, CheckpointError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"


def _summary(reports: list[bytes]) -> str:
    """One line from all ranks' reports: equal ones once, at most three different ones."""
    failed: dict[str, list[int]] = {}
    for index, report in enumerate(reports):
        if report:
            failed.setdefault(report.decode(), []).append(index)
    if len(reports) == 1:
        return "".join(failed)
    parts = [f"{_who(ranks)}: {text}" for text, ranks in list(failed.items())[:_NAMED_REPORTS]]
    if len(failed) > _NAMED_REPORTS:
        parts.append(f"and {len(failed) - _NAMED_REPORTS} other failures")
    return "; ".join(parts)


def _who(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")


def _to_bytes(message: torch.Tensor) -> bytes:
    return message.cpu().numpy().tobytes()
