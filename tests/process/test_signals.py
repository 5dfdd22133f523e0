"""The flag of signals: what is the first, what the second, and who takes it while blocked."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from megalite.process import signals
from megalite.process.launcher import Launch
from megalite.process.signals import CAUGHT, SignalFlag

TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
FIRST = "saves at the end of the step and leaves; again: ends at once"


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.fixture
def ends() -> list[int]:
    """Codes with which the process would have ended."""
    return []


@pytest.fixture
def flag(ends: list[int]) -> Iterator[SignalFlag]:
    flag = SignalFlag()
    flag.end = ends.append
    with flag:
        yield flag


@pytest.mark.parametrize("number", CAUGHT)
def test_the_first_signal_is_remembered_and_told_once(
    flag: SignalFlag, ends: list[int], capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    assert not flag.raised
    assert flag.asked_s(since=0.0) == 0
    send(number)
    assert (flag.raised, flag.name, ends) == (True, number.name, [])
    assert capfd.readouterr().err == f"{number.name}: {FIRST}\n"
    assert 0 < flag.asked_s(since=0.0) < 60
    assert flag.asked_s(since=time.monotonic() + 60) == 0


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((INT, INT), 130),
        ((TERM, TERM), 143),
        ((HUP, INT), 130),
        ((TERM, HUP), 129),
        ((USR1, USR1), None),  # a warning may come twice,
        ((USR1, TERM), None),  # the time limit after it while the run still saves,
        ((TERM, USR1), None),  # and it asks for no more than was asked for
        ((USR1, INT, INT), 130),
    ],
)
def test_the_second_ends_at_once(
    flag: SignalFlag,
    ends: list[int],
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[int, ...],
    code: int | None,
) -> None:
    for second, number in enumerate(numbers):
        monkeypatch.setattr(time, "monotonic", lambda at=float(second): at)
        send(number)
    assert ends == ([] if code is None else [code])
    assert flag.name == signal.Signals(numbers[0]).name


def test_a_signal_that_the_launcher_passes_on_as_well_is_the_same_request(
    flag: SignalFlag, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    flag.place(Launch(rank=1, world_size=2, local_rank=1, local_world_size=2, source="torchrun"))
    now = time.monotonic()
    for later_s, numbers, codes in ((0, [USR1], []), (100, [TERM, TERM], []), (200, [TERM], [143])):
        monkeypatch.setattr(time, "monotonic", lambda at=now + later_s: at)
        send(*numbers)
        assert ends == codes


@pytest.mark.parametrize("is_placed", [True, False])
def test_timeout_sends_one_request_twice(
    flag: SignalFlag, ends: list[int], monkeypatch: pytest.MonkeyPatch, is_placed: bool
) -> None:
    """To its child and to the group. A run of one process is placed, a local launcher is not."""
    if is_placed:
        flag.place(Launch())
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    send(TERM, TERM)
    assert ends == []
    monkeypatch.setattr(time, "monotonic", lambda: 100.3)
    send(TERM)
    assert ends == [143]


def test_a_verb_is_interrupted_once(ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes while it cleans up either ends it at once or is left alone."""
    with SignalFlag(interrupts=True) as flag:
        flag.end = ends.append
        with pytest.raises(KeyboardInterrupt):
            send(TERM)
        send(TERM, USR1)
        assert ends == []
        send(INT)
        assert ends == [130]


def test_ranks_of_the_local_launcher_leave_speech_and_count_to_it(
    flag: SignalFlag, ends: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    flag.place(Launch(world_size=2, local_world_size=2, source="local"))
    send(INT, INT, INT)
    assert ends == []
    assert capfd.readouterr().err == ""


def test_an_ignored_hangup_stays_ignored(ends: list[int]) -> None:
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        with SignalFlag() as flag:
            send(HUP)
            assert not flag.raised
        assert signal.getsignal(HUP) == signal.SIG_IGN
    finally:
        signal.signal(HUP, before)


def test_handlers_are_restored(flag: SignalFlag) -> None:
    with flag:
        send(TERM)
    assert signal.getsignal(TERM) == flag._handle
    before = signal.getsignal(INT)
    with SignalFlag() as inner:
        inner.listen()
        assert signal.getsignal(INT) == inner._handle
    assert signal.getsignal(INT) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_each_signal_around_the_start_of_the_thread_counts_once(
    flag: SignalFlag, ends: list[int]
) -> None:
    passed: queue.Queue[int] = queue.Queue()
    flag.pass_on = passed.put
    send(USR1)
    flag.listen()
    flag.listen()
    send(USR1)
    assert [passed.get(timeout=60) for _ in range(2)] == [USR1, USR1]
    assert passed.empty()


# The main thread sits in a lock that C code waits for without a look at signals, as a collective
# does; the thread has to take them.
BLOCKED = """
import ctypes
from megalite.process.signals import SignalFlag
with SignalFlag() as flag:
    flag.listen()
    lock, library = ctypes.create_string_buffer(256), ctypes.CDLL(None)
    library.pthread_mutex_lock(lock)
    print("ready", flush=True)
    library.pthread_mutex_lock(lock)
"""


@pytest.mark.long
def test_a_blocked_process_takes_both_signals() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(TERM)
        assert process.stderr.readline() == f"SIGTERM: {FIRST}\n"
        process.send_signal(INT)
        assert process.wait(60) == 130
        assert process.stderr.read() == "SIGINT again: ends at once, without saving\n"


def test_a_wait_is_bounded_once_a_signal_came(
    flag: SignalFlag, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signals, "LEAVE_S", 0.2)
    codes: queue.Queue[int] = queue.Queue()
    flag.end = codes.put
    with flag.bounds("the others"):
        with pytest.raises(queue.Empty):
            codes.get(timeout=1.5)
        send(TERM)
        assert codes.get(timeout=60) == 1
    assert capfd.readouterr().err.endswith("SIGTERM: leaves after 0.2 s without the others\n")
