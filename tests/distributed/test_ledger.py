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
    totals = ledger.as_dict()
    assert totals["all_reduce/tp"] == {"calls": 2, "bytes_sent": 150.0}
    assert set(totals) == {"all_reduce/tp", "all_gather/tp", "all_reduce/dp", "tp"}
    assert ledger.axis_totals("tp")["bytes_sent"] == 158.0
    assert ledger.axis_totals("tp")["calls"] == 3
    assert ledger.axis_totals("pp") == {"calls": 0, "bytes_sent": 0, "seconds": 0.0}


def test_a_reset_keeps_the_operation_number() -> None:
    ledger = Ledger("rank 0")
    assert ledger.describe() == "rank 0: no operation between ranks yet, phase 'set-up'"
    ledger.start("all_reduce", "tp", 100.0)
    ledger.reset()
    assert ledger.as_dict() == {}
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
