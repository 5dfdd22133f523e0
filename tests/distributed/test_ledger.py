"""What the ledger keeps, what a reset forgets, and who speaks when nothing moves."""

from __future__ import annotations

import threading

import pytest

from megalite.distributed.ledger import Ledger
from megalite.process.watch import Watch


def test_totals_by_operation_and_by_axis() -> None:
    ledger = Ledger("rank 0")
    ledger.start("all_reduce", "tp", 100.0)
    ledger.start("all_reduce", "tp", 50.0)
    ledger.start("all_gather", "tp", 8.0)
    ledger.start("all_reduce", "dp", 1.0)
    with ledger.blocked("tp"):
        pass
    keys = [("all_reduce", "tp"), ("all_gather", "tp"), ("all_reduce", "dp")]
    assert ledger.counts == dict(zip(keys, [2, 1, 1], strict=True))
    assert ledger.bytes_sent == dict(zip(keys, [150.0, 8.0, 1.0], strict=True))
    assert set(ledger.seconds) == {"tp"}


def test_a_reset_keeps_the_operation_number() -> None:
    ledger = Ledger("rank 0")
    assert ledger.describe() == "rank 0: no operation between ranks yet, phase 'set-up'"
    ledger.start("all_reduce", "tp", 100.0)
    ledger.reset()
    assert not ledger.counts
    assert not ledger.bytes_sent
    ledger.phase = "forward"
    ledger.start("all_gather", "dp", 1.0)
    assert ledger.describe() == "rank 0: waiting in all_gather on dp, op #2, phase 'forward'"


def test_an_error_is_annotated_and_its_wait_counted() -> None:
    ledger = Ledger("rank 3 (tp 1)")
    ledger.start("all_reduce", "tp", 1.0)
    first = ledger.last_op
    ledger.start("all_gather", "dp", 1.0)
    with pytest.raises(RuntimeError) as caught, ledger.blocked("tp", first):
        raise RuntimeError("timed out")
    assert caught.value.__notes__ == [
        "rank 3 (tp 1): waiting in all_reduce on tp, op #1, phase 'set-up'"
    ]
    assert ledger.seconds["tp"] > 0


def test_the_watch_reports_a_stuck_rank_once_until_it_moves_again() -> None:
    ledger = Ledger("rank 0")
    lines: list[str] = []
    said = threading.Event()

    def report(line: str) -> None:
        lines.append(line)
        said.set()

    ledger.start("all_reduce", "tp", 1.0)
    with Watch(ledger, 0.01, report):
        assert said.wait(30)
        assert not threading.Event().wait(0.1)
        assert len(lines) == 1
        said.clear()
        ledger.start("all_gather", "dp", 1.0)
        assert said.wait(30)
    assert "all_reduce on tp, op #1" in lines[0]
    assert "all_gather on dp, op #2" in lines[1]
