"""A thread that reports when this rank is stuck, and which rank it is waiting for.

gloo turns a hang into an exception, which the ledger annotates. NCCL's own watchdog ends the
process without a word on where the program was; this thread reports before that. Every rank posts
its state on the board, so the others can distinguish a rank that is dead or stopped (its beat
stands still), one that failed (it posted its error) and one that is elsewhere in the program (it
has not reached the operation that others wait in). On CUDA that is the state of the device; the
thread makes no call to CUDA, which could block it.

It ends the process in two cases. Another rank has failed, so that nothing that this one waits for
will come. Or a signal asked the run to leave, and the rank cannot reach the step's edge, because a
rank that it waits for is gone or nothing moves for too long.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType

from megalite.distributed.ledger import Ledger
from megalite.errors import EXIT_FAULT
from megalite.process.board import Board, Notice
from megalite.process.signals import LEAVE_S, leave_now

# The longest time between two posts of a rank; in a large world it grows so that all ranks together
# make at most so many posts a second, which is no load for the store.
BEAT_S, _POSTS_PER_S = 1.0, 1000

# A rank without a new beat for so long is reported as dead or stopped: a busy machine pauses, too.
_SILENT_S = 3.0

# A rank that is stuck for so long ends itself if another one has failed. If a signal asked it to
# leave, it watches the others for the rest of LEAVE_S, longer than above as it then ends itself.
_LEAVE_STUCK_S = 5.0

# Such a rank leaves, though all others live, when it is stuck for so many times `after_s`: for
# train.timeout_s, in which a collective that merely waits for slow ranks is done. Saves are not
# bounded: how long one takes depends on the disk, and the ledger does not see it move.
_LEAVE_SHARE = 2.0

# Most ranks that a report names.
_MAX_NAMED = 4


class Watch:
    """Context manager: while active, a thread reports when this rank is stuck.

    `report` gets lines each time that no operation between ranks has started or ended for `after_s`
    seconds, followed by `advice`, unless that is "". Set `after_s` below the collectives' timeout.

    With a `board`, the lines name the ranks that are dead or stopped, have failed, or are behind; a
    line that several ranks would report comes from one of them. An exception raised while waiting
    for other ranks gets the lines as notes. `asked_s(since)` is for how many seconds since then the
    process has been asked to leave (`SignalFlag.asked_s`); if then a rank that it waits for is
    gone, or nothing moves for twice `after_s`, the thread calls `end(EXIT_FAULT)`. It does so
    unasked if another rank has failed and this one waits.
    """

    def __init__(
        self,
        ledger: Ledger,
        after_s: float,
        report: Callable[[str], None],
        board: Board | None = None,
        asked_s: Callable[[float], float] = lambda since: 0.0,
        end: Callable[[int], object] = leave_now,
        advice: str = "",
    ) -> None:
        self._ledger, self._after_s, self._report, self._board = ledger, after_s, report, board
        self._asked_s, self._end, self._advice = asked_s, end, advice
        world_size = 1 if board is None else board.world_size
        self._beat_s = max(min(BEAT_S, after_s / 4), world_size / _POSTS_PER_S)
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
        # Only an error of a wait for other ranks can be explained by what became of them.
        if isinstance(error, Exception) and error is self._ledger.broken_by:
            _, lines = self._look_at_others(_SILENT_S)
            for line in lines:
                error.add_note(line)

    def _run(self) -> None:
        """Body of the thread: post at each beat; report once each time that the rank is stuck."""
        moved, moved_at, reported = self._moves(), time.monotonic(), False
        while not self._stop.wait(self._beat_s):
            self._post()
            stuck_s = time.monotonic() - moved_at
            if self._moves() != moved:
                moved, moved_at, reported = self._moves(), time.monotonic(), False
            elif not reported and stuck_s >= self._after_s:
                # The own place first: it needs no store, and looking at the others takes seconds.
                reported = True
                self._report(f"nothing new for {self._after_s:g} s: {self._ledger.describe()}")
                _, lines = self._look_at_others(_SILENT_S)
                self._report_once([*lines, self._advice] if self._advice else lines)
            elif stuck_s >= min(_LEAVE_STUCK_S, self._after_s) and self._must_leave(moved_at):
                self._end(EXIT_FAULT)
                return

    def _moves(self) -> tuple[int, int]:
        """Numbers that change with each operation that starts or ends."""
        return self._ledger.num_ops, self._ledger.progress().num_done

    def _must_leave(self, moved_at: float) -> bool:
        """True, reported, if this rank waits for one that has failed, or is asked to leave and will
        not reach the step's edge.
        """
        moved = self._moves()
        if self._board is None:
            return False
        if self._ledger.progress().waits_in is not None and self._board.anyone_failed():
            _, lines = self._look_at_others(0.0)
            self._report_once(lines)
            return not self._stop.is_set()
        if self._asked_s(moved_at) == 0:
            return False
        # A rank that is gone never agrees to save and leave, so waiting for it is useless.
        is_gone, lines = self._look_at_others(LEAVE_S - _LEAVE_STUCK_S)
        if self._stop.is_set() or self._moves() != moved:
            return False
        asked_s = self._asked_s(moved_at)
        saves = self._ledger.phase == "checkpoint"
        if not is_gone and (saves or asked_s < _LEAVE_SHARE * self._after_s):
            return False
        self._report_once(lines)
        self._report(f"asked to leave and stuck for {asked_s:.0f} s: {self._ledger.describe()}")
        return True

    def _report_once(self, lines: list[str]) -> None:
        """Report lines that no other rank has reported; their places make them differ in time."""
        for line in lines:
            if self._board is not None and self._board.first_to_report(line):
                self._report(line)

    def _post(self) -> None:
        if self._board is not None:
            self._beat += 1
            progress = self._ledger.progress()
            self._board.post(
                Notice(
                    self._beat, progress.num_done, self._ledger.describe(),
                    progress.waits_in is not None, progress.reached, self._failed, self._left,
                )
            )  # fmt: skip

    def _look_at_others(self, silent_s: float) -> tuple[bool, list[str]]:
        """True if another rank is gone, and the lines to report about the other ranks.

        Takes `silent_s` seconds, or three beats if that is longer, unless a rank has failed.
        """
        board = self._board
        if board is None:
            return False, []
        before = board.read()

        # Ranks that live post a new beat in this time. A rank that posted its error needs no wait.
        if before is not None and not _failed(before, board.rank):
            # Counted, not timed: while the whole machine stands, the others cannot post either.
            pause_s = self._beat_s / 2
            for _ in range(math.ceil(max(silent_s, 3 * self._beat_s) / pause_s)):
                time.sleep(pause_s)
                self._post()  # the other ranks may be looking for this one

        after = board.read()
        if before is None or after is None:
            return True, ["who serves the rendezvous (rank 0, or torchrun's agent) is gone"]
        lines = _gone(before, after, board.rank)
        return bool(lines), lines or self._late(after) or _behind(after)

    def _late(self, notices: dict[int, Notice]) -> list[str]:
        """Lines on the ranks that have not reached the operation that this one waits in."""
        op = self._ledger.progress().waits_in
        if op is None:
            return []
        late = {
            rank: notices[rank]
            for rank in op.channel or self._ledger.groups.get(op.axis, ())
            if rank in notices and notices[rank].reached.get(op.lane, 0) < op.ordinal
        }
        # A late rank that waits itself reports on those that it waits for.
        first = {rank: notice for rank, notice in late.items() if not notice.waits}
        return [
            f"rank {rank} has not come to an operation that others wait in: {notice.where}"
            for rank, notice in list((first or late).items())[:_MAX_NAMED]
        ]


def _failed(notices: dict[int, Notice], own_rank: int) -> dict[int, Notice]:
    """The notices of the other ranks that posted an error."""
    return {rank: notice for rank, notice in notices.items() if notice.failed and rank != own_rank}


def _gone(before: dict[int, Notice], after: dict[int, Notice], own_rank: int) -> list[str]:
    """Lines on the other ranks that failed; if none did, on those whose beat stood still."""
    if failed := _failed(after, own_rank):
        return [
            f"rank {rank} failed ({notice.failed}); it was at: {notice.where}"
            for rank, notice in list(failed.items())[:_MAX_NAMED]
        ]
    silent = {
        rank: notice
        for rank, notice in after.items()
        if rank != own_rank
        and not notice.left
        and rank in before
        and before[rank].beat == notice.beat
    }
    return [
        f"rank {rank} gives no sign of life, it is dead or stopped; last seen at: {notice.where}"
        for rank, notice in list(silent.items())[:_MAX_NAMED]
    ]


def _behind(notices: dict[int, Notice]) -> list[str]:
    """Lines on the ranks that have done the fewest operations, if not all have the same."""
    fewest = min(notice.num_ops for notice in notices.values())
    if fewest == max(notice.num_ops for notice in notices.values()):
        return []
    behind = {rank: notice for rank, notice in notices.items() if notice.num_ops == fewest}
    return [
        f"rank {rank} is furthest behind: {notice.where}"
        for rank, notice in list(behind.items())[:_MAX_NAMED]
    ]
