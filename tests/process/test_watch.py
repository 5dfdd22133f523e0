"""The board and the watch: which rank is to blame, reported once. No processes but for gloo."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megalite.distributed import comm
from megalite.distributed.ledger import Ledger
from megalite.errors import ConfigError
from megalite.process import watch
from megalite.process.board import Board, Notice
from megalite.process.watch import Watch
from tests.pool import RankPool

AFTER_S = 0.2


class Rank:
    """One of several ranks: its ledger, and what its watch reports."""

    def __init__(self, store: HashStore, rank: int, world_size: int = 2) -> None:
        self.ledger = Ledger(f"rank {rank} (tp {rank})")
        self.board = Board(store, rank, world_size)
        self.lines: list[str] = []
        self.blamed = threading.Event()

    def report(self, line: str) -> None:
        self.lines.append(line)
        if not line.startswith("nothing new"):
            self.blamed.set()

    @contextmanager
    def watched(self, after_s: float = AFTER_S, **options: Any) -> Iterator[None]:
        with Watch(self.ledger, after_s, self.report, self.board, **options):
            yield


@pytest.fixture
def ranks() -> list[Rank]:
    store = HashStore()
    return [Rank(store, rank) for rank in range(2)]


@pytest.mark.long
def test_a_silent_rank_is_named_with_its_last_place(ranks: list[Rank]) -> None:
    ranks[1].board.post(Notice(1, 12, "rank 1 (tp 1): waiting in all_reduce on tp, op #12"))
    ranks[0].ledger.start("all_reduce", "tp", 8)
    with ranks[0].watched():
        assert ranks[0].blamed.wait(60)
    assert ranks[0].lines == [
        "nothing new for 0.2 s: rank 0 (tp 0): past all_reduce on tp, op #1, phase 'set-up'",
        "rank 1 gives no sign of life, it is dead or stopped; last seen at: rank 1 (tp 1): "
        "waiting in all_reduce on tp, op #12",
    ]


@pytest.mark.long
def test_a_rank_that_skipped_an_operation_is_named_once(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.ledger.start("all_reduce", "tp", 8)
    ranks[0].ledger.phase = "optimizer"
    ranks[0].ledger.start("all_gather", "dp", 8)
    with ranks[0].watched(), ranks[1].watched():
        while not any(rank.blamed.wait(0.05) for rank in ranks):
            pass
        threading.Event().wait(10 * AFTER_S)
    blame = [line for rank in ranks for line in rank.lines if not line.startswith("nothing new")]
    assert set(blame) == {
        "rank 1 is furthest behind: rank 1 (tp 1): past all_reduce on tp, op #1, phase 'set-up'"
    }


def follow(rank: Rank, axis: str, done: bool, channel: tuple[int, int] | None = None) -> None:
    """Launch an operation that the device has, or has not, finished."""
    op = rank.ledger.start("all_reduce" if channel is None else "send", axis, 8, channel)
    rank.ledger.follow(op, lambda: done)


@pytest.mark.parametrize("channel", [None, (0, 1)], ids=["collective", "message"])
def test_a_device_that_has_not_come_is_named_though_all_hosts_launched_the_same(
    ranks: list[Rank], hasty: None, channel: tuple[int, int] | None
) -> None:
    """Both hosts have launched all and wait for the step's edge; the device of rank 1 is behind."""
    for rank, done in zip(ranks, (True, False), strict=True):
        rank.ledger.groups = {"tp": (0, 1), "dp": (1, 3), "edge": (0, 1)}
        rank.ledger.phase = "backward"
        follow(rank, "dp", done)
        follow(rank, "tp", False, channel)
        rank.ledger.phase = "step edge"
        follow(rank, "edge", False)
    with (
        ranks[1].ledger.blocked("edge"), ranks[0].ledger.blocked("edge"),
        ranks[1].watched(3600.0), ranks[0].watched(),
    ):  # fmt: skip
        assert ranks[0].blamed.wait(60)
    name = "all_reduce" if channel is None else "send"
    assert ranks[0].lines == [
        f"nothing new for 0.2 s: rank 0 (tp 0): waiting in {name} on tp, op #2, phase 'backward'",
        "rank 1 has not come to an operation that others wait in: rank 1 (tp 1): waiting in "
        "all_reduce on dp, op #1, phase 'backward'",
    ]


def test_a_rank_in_no_operation_is_named_before_those_that_wait_for_it(hasty: None) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which computes; rank 0 has done least."""
    store = HashStore()
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.ledger.groups = {"tp": (0, 1, 2), "dp": (1, 2)}
    for _ in range(9):
        follow(ranks[1], "pp", True, (1, 2))
        follow(ranks[2], "pp", True, (1, 2))
    follow(ranks[1], "dp", False)
    follow(ranks[0], "tp", False)
    with ranks[1].watched(3600.0), ranks[2].watched(3600.0), ranks[0].watched():
        assert ranks[0].blamed.wait(60)
    assert ranks[0].lines[1:] == [
        "rank 2 has not come to an operation that others wait in: rank 2 (tp 2): past send on pp, "
        "op #9, phase 'set-up'"
    ]


def test_a_device_that_gets_on_moves_its_rank(ranks: list[Rank]) -> None:
    """Though its host launches nothing: it has launched a step that takes long."""
    done = False
    ranks[0].ledger.follow(ranks[0].ledger.start("all_reduce", "tp", 8), lambda: done)
    watching = Watch(ranks[0].ledger, 1.0, print)
    before = watching._moves()
    assert watching._moves() == before
    done = True
    assert watching._moves() != before


def rank_1_computes(ctx):
    """Operations so far, and the lines of rank 0's watch over the last of three more.

    Rank 1 comes to the third of them once it was named. Rank 0 watches that one alone, because a
    busy machine may let it wait in the others, too.
    """
    mesh = ctx.mesh(tp=2)
    before = mesh.ledger.num_ops  # of tests that had this mesh before
    store = dist.distributed_c10d._get_default_store()
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if not line.startswith("nothing new"):
            store.set("named", "")

    board = Board.of_world(ctx.rank, 2)
    watching = Watch(mesh.ledger, AFTER_S if ctx.rank == 0 else 3600.0, report, board)
    with ExitStack() as stack:
        for number in range(3):
            if number == (2 if ctx.rank == 0 else 0):
                stack.enter_context(watching)
            mesh.ledger.step = number + 1
            if ctx.rank == 1 and number == 2:
                store.wait(["named"])
            comm.all_reduce(torch.ones(2), mesh.tp)
    return before, lines


@pytest.mark.long
def test_the_same_over_gloo(pool: RankPool) -> None:
    (mine, lines), (theirs, _) = pool.run(rank_1_computes, 2)
    assert lines == [
        f"nothing new for 0.2 s: rank 0 (tp 0): waiting in all_reduce on tp, op #{mine + 3}, step "
        "3, phase 'test'",
        "rank 1 has not come to an operation that others wait in: rank 1 (tp 1): past all_reduce "
        f"on tp, op #{theirs + 2}, step 2, phase 'test'",
    ]


def test_what_helps_is_reported_behind_the_ranks(ranks: list[Rank], hasty: None) -> None:
    ranks[1].board.post(Notice(1, 12, "rank 1"))
    with ranks[0].watched(advice="torch records its operations in FILE"):
        while len(ranks[0].lines) < 3:
            time.sleep(0.01)
    assert ranks[0].lines[2:] == ["torch records its operations in FILE"]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that is sure of itself within half a second."""
    monkeypatch.setattr(watch, "_SILENT_S", 0.3)
    monkeypatch.setattr(watch, "_LEAVE_STUCK_S", 0.1)
    monkeypatch.setattr(watch, "LEAVE_S", 0.3)
    monkeypatch.setattr(watch, "BEAT_S", 0.02)


class End:
    """Takes the place of the process's end."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.came = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.came.set()


def since(asked_at: float) -> Callable[[float], float]:
    """`SignalFlag.asked_s` of a process that was asked to leave at a time."""
    return lambda moved_at: max(0.0, time.monotonic() - max(asked_at, moved_at))


def test_who_is_asked_to_leave_does_not_wait_for_a_dead_rank(
    ranks: list[Rank], hasty: None
) -> None:
    ranks[1].board.post(Notice(1, 12, "rank 1"))
    end = End()
    with ranks[0].watched(3600.0, asked_s=since(0.0), end=end):
        assert end.came.wait(60)
    assert end.codes == [1]
    gone, stuck = ranks[0].lines
    assert gone == "rank 1 gives no sign of life, it is dead or stopped; last seen at: rank 1"
    assert re.fullmatch(r"asked to leave and stuck for \d+ s: rank 0 \(tp 0\): no .*", stuck)


@pytest.mark.parametrize(("phase", "leaves"), [("optimizer", True), ("checkpoint", False)])
def test_who_is_asked_to_leave_waits_for_live_ranks_as_long_as_a_collective_may_take(
    ranks: list[Rank], hasty: None, phase: str, leaves: bool
) -> None:
    """But for a save, which the ledger does not see move."""
    end, began = End(), time.monotonic()
    ranks[0].ledger.phase = phase
    with ranks[1].watched(3600.0), ranks[0].watched(0.6, asked_s=since(0.0), end=end):
        assert end.came.wait(60 if leaves else 3) == leaves
    if leaves:
        assert time.monotonic() - began >= 1.2
        assert re.match(r"asked to leave and stuck for \d+ s: rank 0 ", ranks[0].lines[-1])


def test_who_is_asked_to_leave_and_gets_on_stays(ranks: list[Rank], hasty: None) -> None:
    """It moves at every eighth beat of its own, so that it counts as stuck between two moves."""
    ranks[1].board.post(Notice(1, 12, "rank 1"))
    end, beats, post = End(), itertools.count(1), ranks[0].board.post
    beaten = threading.Event()

    def move_and_post(notice: Notice) -> bool:
        beat = next(beats)
        if beat % 8 == 0 and beat <= 80:
            ranks[0].ledger.start("all_reduce", "tp", 8)
        if beat == 80:
            assert not end.codes
            beaten.set()
        return post(notice)

    ranks[0].board.post = move_and_post
    with ranks[0].watched(3600.0, asked_s=since(0.0), end=end):
        assert beaten.wait(60), "it left"
        assert end.came.wait(60), "it stays although it stands still"


def test_who_waits_for_a_rank_that_failed_leaves_unasked(ranks: list[Rank], hasty: None) -> None:
    """On NCCL no exception ends it. It need not be the failed rank that has not come."""
    end = End()
    follow(ranks[0], "tp", False)
    with ranks[0].watched(3600.0, end=end):
        with pytest.raises(ValueError, match="cause"), ranks[1].watched(end=end):
            raise ValueError("the cause")
        assert end.came.wait(60)
    assert end.codes == [1]
    assert ranks[0].lines == [
        "rank 1 failed (ValueError: the cause); it was at: rank 1 (tp 1): no operation between "
        "ranks yet, phase 'set-up'"
    ]


def test_who_waits_in_nothing_is_not_ended_by_the_failure_of_another_rank(
    ranks: list[Rank], hasty: None
) -> None:
    end = End()
    ranks[0].board.post(Notice(1, 0, "rank 0", failed="ValueError: the cause"))
    watching = Watch(ranks[1].ledger, 3600.0, print, ranks[1].board, end=end)
    assert not watching._must_leave(0.0)
    follow(ranks[1], "tp", False)
    assert watching._must_leave(0.0)


def test_a_rank_whose_notices_go_on_or_that_is_done_is_not_gone() -> None:
    done = {1: Notice(7, 9, "rank 1", left=True)}
    assert watch._gone(done, done, 0) == []
    before = {0: Notice(5, 9, "rank 0"), 1: Notice(7, 9, "rank 1")}
    after = {0: Notice(5, 9, "rank 0"), 1: Notice(8, 9, "rank 1")}
    assert watch._gone(before, after, 0) == []
    assert watch._gone(before, after, 1) == [
        "rank 0 gives no sign of life, it is dead or stopped; last seen at: rank 0"
    ]


def test_an_exception_is_annotated_with_the_failure_of_another_rank(ranks: list[Rank]) -> None:
    with pytest.raises(ValueError, match="cause"), ranks[1].watched():
        raise ValueError("the cause")
    ranks[0].ledger.start("all_reduce", "tp", 8)
    with (
        pytest.raises(ConnectionError) as caught,
        ranks[0].watched(),
        ranks[0].ledger.blocked("tp"),
    ):
        raise ConnectionError("closed by peer")
    assert caught.value.__notes__[1:] == [
        "rank 1 failed (ValueError: the cause); it was at: rank 1 (tp 1): no operation between "
        "ranks yet, phase 'set-up'"
    ]


@pytest.mark.parametrize("notes", [[], ["rank 0 (pp 0) in F0.0, number 1 of 8 of its program"]])
def test_an_error_of_its_own_gets_no_notes(
    ranks: list[Rank], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if others have noted on it where it was raised, and after an earlier wait has failed."""
    ranks[1].board.post(Notice(1, 12, "rank 1"))
    with pytest.raises(ConnectionError), ranks[0].ledger.blocked("tp"):
        raise ConnectionError("closed by peer")
    error = ConfigError("train.steps=0")
    for note in notes:
        error.add_note(note)
    looks: list[float] = []
    monkeypatch.setattr(Watch, "_look_at_others", lambda _, silent_s: looks.append(silent_s))
    with pytest.raises(ConfigError), ranks[0].watched(3600.0):
        raise error
    assert getattr(error, "__notes__", []) == notes
    assert looks == [], "it has waited for others"


def test_one_rank_is_the_first_to_report_a_thing(ranks: list[Rank]) -> None:
    boards = [rank.board for rank in ranks]
    assert [board.first_to_report("a") for board in boards] == [True, False]
    assert boards[1].first_to_report("b")


def test_the_rank_that_serves_the_store_leaves_last(ranks: list[Rank]) -> None:
    first, second = (rank.board for rank in ranks)
    waiting = threading.Thread(target=first.leave, args=(3600.0,), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    second.leave(3600.0)  # returns at once: another rank serves
    waiting.join(60.0)
    assert not waiting.is_alive()
    first.leave(0.0)


def test_a_store_that_is_gone_silences_and_holds_nobody() -> None:
    class Gone(HashStore):
        def add(self, key: str, count: int) -> int:
            raise ConnectionError("gone")

    board = Board(Gone(), 0, 2)
    board._store = Gone()  # type: ignore[assignment]
    assert board.first_to_report("a")
    board.leave(3600.0)
