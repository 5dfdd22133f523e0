"""The split of a step's time, on a device whose clock the test turns by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megalite.distributed.clock import Clock, seconds_between
from megalite.distributed.ledger import Ledger
from megalite.record.step_clock import StepClock, drain_part


class Device:
    """A stand-in for CUDA: work is queued, and an event knows its time once it was reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self.num_syncs = 0
        self.num_marks = 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                device.num_events += 1

            def record(self) -> None:
                device.num_marks += 1
                self.at_s = device.now_s

            def synchronize(self) -> None:
                device.num_syncs += 1

            def elapsed_time(self, other: Any) -> float:
                return float(other.at_s - self.at_s) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        self.ledger = Ledger("rank 0", Clock(torch.device("cuda")))

    def work(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, axis: str, seconds: float) -> None:
        with self.ledger.blocked(axis):
            self.now_s += seconds


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def step(device: Device, clock: StepClock) -> None:
    device.work(0.5)
    clock.lap("other")
    device.work(0.125)
    device.wait("dp", 0.25)
    clock.lap("data")
    device.work(4.0)
    device.wait("tp", 1.0)
    device.wait("pp", 2.0)
    device.wait("dp_cp", 0.5)
    clock.lap("compute")
    device.wait("embedding", 0.25)
    device.wait("world", 8.0)
    device.work(1.5)
    clock.lap("optimizer")
    device.wait("world", 0.125)


def test_every_second_of_the_device_belongs_to_one_part(device: Device) -> None:
    clock = StepClock(device.ledger, drain="pp_wait")
    assert device.ledger.waits is None  # nothing is marked before a step begins
    clock.begin(1)
    for _ in range(3):
        began_s = device.now_s
        step(device, clock)
        parts_s = clock.finish().parts_s
        assert parts_s == {
            "compute": 4.0,
            "tp_comm": 1.0,
            "pp_wait": 10.25,  # with the world's wait for the norm: the end of the bubble
            "dp_comm": 0.75,
            "data": 0.125,
            "optimizer": 1.5,
            "other": 0.625,
        }
        assert sum(parts_s.values()) == device.now_s - began_s


def test_nothing_is_synchronised_within_a_step_and_events_are_used_again(device: Device) -> None:
    clock = StepClock(device.ledger)
    clock.begin(1)
    made = []
    for _ in range(4):
        before = device.num_syncs
        step(device, clock)
        assert device.num_syncs == before
        clock.finish()
        made.append(device.num_events)
    assert made[3] - made[2] <= 1 < made[0]


def test_only_measured_steps_have_marks(device: Device) -> None:
    """Every third, from the end of the step before; the others have the host's time alone."""
    clock = StepClock(device.ledger, "pp_wait", lambda number: number % 3 == 0)
    clock.begin(1)
    marks = []
    for number in range(1, 8):
        before, began_s = device.num_marks, device.now_s
        step(device, clock)
        times = clock.finish()
        assert times.wall_s > 0
        marks.append(device.num_marks - before)
        if number % 3:
            assert times.parts_s == {}
        else:
            assert sum(times.parts_s.values()) == device.now_s - began_s
            assert times.parts_s["pp_wait"] == 10.25
    # 7 waits of two marks, 5 laps; the first mark stands at the end of the step before
    assert marks == [0, 1, 7 * 2 + 5, 0, 1, 19, 0]
    assert device.ledger.waits is None


def test_the_start_of_an_operation_is_marked_on_the_host_clock_alone(device: Device) -> None:
    for ledger, expected in ((device.ledger, 0), (Ledger("rank 0"), 1)):
        clock = StepClock(ledger)
        clock.begin(1)
        with ledger.blocked("tp", starting=True):
            device.work(1.0)
        assert ledger.waits is not None
        assert len(ledger.waits) == expected


def test_what_lies_between_stop_and_begin_belongs_to_no_step(device: Device) -> None:
    clock = StepClock(device.ledger)
    clock.begin(1)
    step(device, clock)
    clock.stop()
    device.wait("tp", 100.0)
    assert device.ledger.waits is None
    clock.begin(2)
    device.work(1.0)
    clock.lap("compute")
    assert sum(clock.finish().parts_s.values()) == 1.0


@pytest.mark.parametrize(
    ("pp", "dp", "part"), [(2, 2, "pp_wait"), (1, 2, "dp_comm"), (1, 1, "tp_comm")]
)
def test_waiting_for_the_whole_world_is_the_uneven_axis(pp: int, dp: int, part: str) -> None:
    assert drain_part(pp, dp) == part


def test_the_host_clock_measures_the_same_way() -> None:
    ledger = Ledger("rank 0")
    clock = StepClock(ledger)
    clock.begin(1)
    with ledger.blocked("tp"):
        pass
    clock.lap("compute")
    times = clock.finish()
    assert times.parts_s["tp_comm"] > 0
    assert sum(times.parts_s.values()) == pytest.approx(times.wall_s, rel=1e-9)
    assert seconds_between(1.0, 3.5) == 2.5


def test_on_the_host_clock_the_parts_are_the_whole_step_however_long_it_is_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between any two readings of the clock, at the edges of steps too, the process may stand."""
    readings = (2.0**power for power in range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    ledger = Ledger("rank 0")
    clock = StepClock(ledger, measures=lambda number: number % 3 != 0)
    clock.begin(1)
    for number in range(1, 8):
        with ledger.blocked("tp"):
            pass
        clock.lap("compute")
        times = clock.finish()
        assert sum(times.parts_s.values()) == (times.wall_s if number % 3 else 0)


def test_a_failed_wait_is_counted_too(device: Device) -> None:
    clock = StepClock(device.ledger)
    clock.begin(1)

    def fail() -> None:
        with device.ledger.blocked("tp"):
            device.work(2.0)
            raise RuntimeError("timed out")

    work: Callable[[], None] = fail
    with pytest.raises(RuntimeError):
        work()
    clock.lap("compute")
    assert clock.finish().parts_s["tp_comm"] == 2.0
