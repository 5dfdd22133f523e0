"""A thread that speaks up when this rank has been stuck for too long, and says who is to blame.

gloo turns a hang into an exception, which the ledger annotates. NCCL's own watchdog ends the
process instead, without a word on where the program was; this thread says it first. Each rank posts
on the board where it is, so that the others can tell a dead or stopped one (its notices stop), one
that has failed (it says so) and one that is elsewhere (fewer operations). It ends the process in
one case: a signal asked it to leave, and it waits for a rank that is gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

from megalite.distributed.ledger import Ledger
from megalite.process.board import Board, Notice

# A rank posts at least every so many seconds; a thousand ranks a second are no load for the store.
_BEAT_S, _RANKS_PER_S = 1.0, 1000

# How long a rank may be without a beat before it is called dead: a busy machine pauses, too.
_LOOK_S = 3.0

# Who was asked to leave and is stuck for so long looks, so much longer, whether a rank it waits for
# is gone. Both together are below the 30 s that launchers wait before they kill.
_LEAVE_S, _LEAVE_LOOK_S = 5.0, 15.0

# Ranks named at most.
_NAMED = 4


class Watch:
    """Inside `with Watch(...)`: `report` gets lines each time no operation between ranks has
    started for `after_s` seconds. Set `after_s` below the collectives' timeout.

    With a `board`, the lines say which ranks are dead or stopped, have failed, or are behind; and
    an exception met while waiting gets that as notes. Equal lines are told by one rank. `leaving`
    says whether the process was asked to leave; it calls `end(1)` if that cannot be done.
    """

    def __init__(
        self,
        ledger: Ledger,
        after_s: float,
        report: Callable[[str], None],
        board: Board | None = None,
        leaving: Callable[[], bool] = lambda: False,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._ledger, self._after_s, self._report, self._board = ledger, after_s, report, board
        self._leaving, self._end = leaving, end
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
            for line in self._others()[1]:
                error.add_note(line)

    def _run(self) -> None:
        seen, since, reported = self._ledger.num_ops, time.monotonic(), False
        while not self._stop.wait(self._beat_s):
            self._post()
            stuck_s = time.monotonic() - since
            if self._ledger.num_ops != seen:
                seen, since, reported = self._ledger.num_ops, time.monotonic(), False
            elif not reported and stuck_s >= self._after_s:
                reported = True
                self._report(f"nothing new for {self._after_s:g} s: {self._ledger.describe()}")
                self._tell(self._others()[1], seen)
            elif stuck_s >= min(_LEAVE_S, self._after_s) and self._leaving():
                gone, lines = self._others(_LEAVE_LOOK_S)
                if gone and not self._stop.is_set():
                    self._tell(lines, seen)
                    self._end(1)
                    return

    def _tell(self, lines: list[str], seen: int) -> None:
        for line in lines:
            if self._board is not None and self._board.first_to_say(f"{seen} {line}"):
                self._report(line)

    def _post(self) -> None:
        if self._board is not None:
            self._beat += 1
            ledger = self._ledger
            self._board.post(
                Notice(self._beat, ledger.num_ops, ledger.describe(), self._failed, self._left)
            )

    def _others(self, look_s: float = _LOOK_S) -> tuple[bool, list[str]]:
        """What the board says about the other ranks, and whether one of them is gone."""
        board = self._board
        if board is None:
            return False, []
        before = board.read()
        if before is not None and not _failed(before, board.rank):
            until = time.monotonic() + max(look_s, 3 * self._beat_s)
            while time.monotonic() < until:  # the living post meanwhile, as this one does
                time.sleep(self._beat_s / 2)
                self._post()
        after = board.read()
        if before is None or after is None:
            return True, ["who serves the rendezvous (rank 0, or torchrun's agent) is gone"]
        lines = _gone(before, after, board.rank)
        return bool(lines), lines or _behind(after)


def _failed(notices: dict[int, Notice], mine: int) -> dict[int, Notice]:
    return {rank: notice for rank, notice in notices.items() if notice.failed and rank != mine}


def _gone(before: dict[int, Notice], after: dict[int, Notice], mine: int) -> list[str]:
    """Lines on the other ranks that failed, else on those without a sign of life."""
    if failed := _failed(after, mine):
        return [
            f"rank {rank} failed ({notice.failed}); it was at: {notice.where}"
            for rank, notice in list(failed.items())[:_NAMED]
        ]
    silent = {
        rank: notice
        for rank, notice in after.items()
        if rank != mine and not notice.left and rank in before and before[rank].beat == notice.beat
    }
    return [
        f"rank {rank} gives no sign of life, it is dead or stopped; last seen at: {notice.where}"
        for rank, notice in list(silent.items())[:_NAMED]
    ]


def _behind(notices: dict[int, Notice]) -> list[str]:
    """Lines on the ranks that have started the fewest operations, if not all have the same."""
    fewest = min(notice.num_ops for notice in notices.values())
    if fewest == max(notice.num_ops for notice in notices.values()):
        return []
    behind = [rank for rank, notice in notices.items() if notice.num_ops == fewest]
    return [f"rank {rank} is furthest behind: {notices[rank].where}" for rank in behind[:_NAMED]]
