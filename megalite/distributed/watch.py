"""A thread that speaks up when this rank has been stuck for too long, and says who is to blame.

gloo turns a hang into an exception, which the ledger annotates. NCCL's own watchdog ends the
process instead, without a word on where the program was; this thread says it first. Each rank posts
on the board where it is, so that the others can tell a dead or stopped one (its notices stop), one
that has failed (it says so) and one that is elsewhere (fewer operations). It ends nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from megalite.distributed.board import Board, Notice
from megalite.distributed.ledger import Ledger

# A rank posts at least every so many seconds; a thousand ranks a second are no load for the store.
_BEAT_S, _RANKS_PER_S = 1.0, 1000

# Ranks named in one line.
_NAMED = 4


class Watch:
    """Inside `with Watch(...)`: `report` gets lines each time no operation between ranks has
    started for `after_s` seconds. Set `after_s` below the collectives' timeout.

    With a `board`, the lines say which ranks are dead or stopped, have failed, or are behind; and
    an exception met while waiting gets that as notes. Equal lines are told by one rank.
    """

    def __init__(
        self,
        ledger: Ledger,
        after_s: float,
        report: Callable[[str], None],
        board: Board | None = None,
    ) -> None:
        self._ledger, self._after_s, self._report, self._board = ledger, after_s, report, board
        world_size = 1 if board is None else board.world_size
        self._beat_s = max(min(_BEAT_S, after_s / 4), world_size / _RANKS_PER_S)
        self._beat = 0
        self._failed, self._left = "", False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._post()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._failed = f"{type(error).__name__}: {error}".splitlines()[0]
        self._left = error is None
        self._stop.set()
        self._post()
        self._thread.join(self._beat_s)
        # Only an error met while waiting for others (the ledger noted that) is theirs to explain.
        if isinstance(error, Exception) and getattr(error, "__notes__", None):
            for line in self._others():
                error.add_note(line)

    def _run(self) -> None:
        seen, since, reported = self._ledger.num_ops, time.monotonic(), False
        while not self._stop.wait(self._beat_s):
            self._post()
            if self._ledger.num_ops != seen:
                seen, since, reported = self._ledger.num_ops, time.monotonic(), False
            elif not reported and time.monotonic() - since >= self._after_s:
                reported = True
                self._report(f"nothing new for {self._after_s:g} s: {self._ledger.describe()}")
                for line in self._others():
                    if self._board is not None and self._board.first_to_say(f"{seen} {line}"):
                        self._report(line)

    def _post(self) -> None:
        if self._board is not None:
            self._beat += 1
            ledger = self._ledger
            where = f"{ledger.place}: finished" if self._left else ledger.describe()
            self._board.post(Notice(self._beat, ledger.num_ops, where, self._failed))

    def _others(self) -> list[str]:
        """What the board says about the other ranks."""
        board = self._board
        if board is None:
            return []
        before = board.read()
        if before is not None and not _failed(before, board.rank):
            for _ in range(5):  # two beats and a half, in which the living post
                time.sleep(self._beat_s / 2)
                self._post()
        after = board.read()
        if before is None or after is None:
            return ["who serves the rendezvous (rank 0, or torchrun's agent) does not answer"]
        return _verdict(before, after, board.rank)


def _failed(notices: dict[int, Notice], mine: int) -> dict[int, Notice]:
    return {rank: notice for rank, notice in notices.items() if notice.failed and rank != mine}


def _verdict(before: dict[int, Notice], after: dict[int, Notice], mine: int) -> list[str]:
    """Lines on the ranks that failed, else on the silent ones, else on those furthest behind."""
    if failed := _failed(after, mine):
        return [
            f"rank {rank} failed ({notice.failed}); it was at: {notice.where}"
            for rank, notice in list(failed.items())[:_NAMED]
        ]
    silent = {
        rank: notice
        for rank, notice in after.items()
        if rank != mine and rank in before and before[rank].beat == notice.beat
    }
    if silent:
        return [
            f"rank {rank} gives no sign of life, it is dead or stopped; last seen at: "
            f"{notice.where}"
            for rank, notice in list(silent.items())[:_NAMED]
        ]
    fewest = min(notice.num_ops for notice in after.values())
    if fewest == max(notice.num_ops for notice in after.values()):
        return []
    behind = [rank for rank, notice in after.items() if notice.num_ops == fewest]
    return [f"rank {rank} is furthest behind: {after[rank].where}" for rank in behind[:_NAMED]]
