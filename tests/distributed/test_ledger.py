"""What the ledger keeps, what a reset forgets, and who speaks when nothing moves."""

from __future__ import annotations

import threading

import pytest

from megalite.distributed.clock import seconds_between
from megalite.distributed.ledger import Ledger
from megalite.process.watch import Watch


def test_totals_by_operation_and_by_axis() -> None:
    ledger = Ledger("rank 0")
    ledger.start("all_reduce", "tp", 100.0)
    ledger.start("all_reduce", "tp", 50.0)
    ledger.start("all_gather", "tp", 8.0)
    ledger.start("all_reduce", "dp", 1.0)
    keys = [("all_reduce", "tp"), ("all_gather", "tp"), ("all_reduce", "dp")]
    assert ledger.counts == dict(zip(keys, [2, 1, 1], strict=True))
    assert ledger.bytes_sent == dict(zip(keys, [150.0, 8.0, 1.0], strict=True))


def test_a_reset_keeps_the_operation_number() -> None:
    ledger = Ledger("rank 0")
    assert ledger.describe() == "rank 0: no operation between ranks yet, phase 'set-up'"
    ledger.start("all_reduce", "tp", 100.0)
    ledger.reset()
    assert not ledger.counts
    assert not ledger.bytes_sent
    ledger.phase = "forward"
    ledger.start("all_gather", "dp", 1.0)
    assert ledger.describe() == "rank 0: past all_gather on dp, op #2, phase 'forward'"
    with ledger.blocked("dp"):
        assert ledger.describe() == "rank 0: waiting in all_gather on dp, op #2, phase 'forward'"


def test_an_error_is_annotated_and_its_wait_counted() -> None:
    ledger = Ledger("rank 3 (tp 1)")
    ledger.waits = []
    ledger.start("all_reduce", "tp", 1.0)
    first = ledger.last_op
    ledger.start("all_gather", "dp", 1.0)
    with pytest.raises(RuntimeError) as caught, ledger.blocked("tp", first):
        raise RuntimeError("timed out")
    assert caught.value.__notes__ == [
        "rank 3 (tp 1): waiting in all_reduce on tp, op #1, phase 'set-up'"
    ]
    ((axis, began, ended),) = ledger.waits
    assert axis == "tp"
    assert seconds_between(began, ended) > 0


class Device:
    """Takes the place of NCCL: operations end when `complete` is called, in order."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.num_done, self.asked = ledger, 0, 0
        self._followed = 0

    def launch(self, axis: str, channel: tuple[int, int] | None = None) -> None:
        self._followed += 1
        number = self._followed

        def done() -> bool:
            self.asked += 1
            return number <= self.num_done

        self.ledger.follow(self.ledger.start("all_reduce", axis, 8.0, channel), done)

    def complete(self, count: int) -> None:
        self.num_done += count


def test_the_place_is_the_devices_where_the_host_is_ahead() -> None:
    ledger = Ledger("rank 0")
    device = Device(ledger)
    ledger.step, ledger.phase = 3, "forward"
    for axis in ("tp", "dp", "tp"):
        device.launch(axis)
    ledger.phase = "step edge"
    device.complete(1)
    with ledger.blocked("edge"):
        place = "rank 0: waiting in all_reduce on dp, op #2, step 3, phase 'forward'"
        assert ledger.describe() == place
        # The third has not been reached: it stands behind the second.
        assert ledger.progress()[::2] == (1, {"tp": 1, "dp": 1})
        device.complete(2)
        assert ledger.describe().startswith("rank 0: waiting in all_reduce on tp, op #3, step 3")
    assert ledger.progress() == (3, None, {"tp": 2, "dp": 1})
    assert ledger.describe() == "rank 0: past all_reduce on tp, op #3, step 3, phase 'forward'"


def test_messages_are_counted_by_channel() -> None:
    ledger = Ledger("rank 1")
    for channel in [(0, 1), (1, 2), (0, 1)]:
        ledger.start("recv", "pp", 0.0, channel)
    assert ledger.progress().reached == {"pp 0->1": 2, "pp 1->2": 1}
    assert ledger.counts["recv", "pp"] == 3


def test_what_is_kept_is_bounded_and_the_oldest_of_it_stays() -> None:
    ledger = Ledger("rank 0")
    device = Device(ledger)
    for _ in range(3000):
        device.launch("tp")
    assert device.asked == 2999  # one question an operation
    waits_in = ledger.progress().waits_in
    assert waits_in is not None
    assert waits_in.number == 1
    assert ledger.progress().num_done == 0
    device.complete(3000)
    device.launch("tp")
    lane = ledger._lanes["tp", None]
    assert [op.number for op, _ in lane.unfinished] == [3001]


def test_another_thread_may_look_at_any_time() -> None:
    ledger = Ledger("rank 0")
    device = Device(ledger)
    stop, seen, errors = threading.Event(), 0, []

    def look() -> None:
        nonlocal seen
        while not stop.is_set():
            try:
                ledger.describe()
                seen += 1
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    for number in range(20_000):
        device.launch(f"axis {number // 1000}")
        device.complete(number % 3)
    stop.set()
    thread.join(60)
    assert errors == []
    assert seen > 0


def test_the_watch_reports_a_stuck_rank_once_until_it_moves_again() -> None:
    ledger = Ledger("rank 0")
    lines: list[str] = []
    said = threading.Event()

    def report(line: str) -> None:
        lines.append(line)
        said.set()

    ledger.start("all_reduce", "tp", 1.0)
    with Watch(ledger, 0.01, report):
        assert said.wait(60)
        assert not threading.Event().wait(0.1)
        assert len(lines) == 1
        said.clear()
        ledger.start("all_gather", "dp", 1.0)
        assert said.wait(60)
    assert "all_reduce on tp, op #1" in lines[0]
    assert "all_gather on dp, op #2" in lines[1]
