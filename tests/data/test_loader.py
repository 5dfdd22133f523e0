"""Reading ahead: the same values in the caller's order, errors where they belong, a clean end."""

from __future__ import annotations

import threading

import pytest

from megalite.data.loader import Loader
from megalite.errors import DataError


def data_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("megalite-data")]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("prefetch", [1, 4])
def test_any_number_of_workers_gives_each_step_its_own_value(workers: int, prefetch: int) -> None:
    done = []

    def read(step: int) -> int:
        done.append(step)
        return step * step

    with Loader(read, stop=10, workers=workers, prefetch=prefetch) as loader:
        assert [loader.step(step) for step in range(10)] == [n * n for n in range(10)]
        assert sorted(done) == list(range(10)), "each step is read once, none beyond the end"
        assert [loader.step(step) for step in (7, 3, 4)] == [49, 9, 16]
    assert data_threads() == []


def test_steps_are_read_ahead_of_their_use_but_no_further_than_asked() -> None:
    read_so_far = threading.Semaphore(0)
    started = []

    def read(step: int) -> int:
        started.append(step)
        read_so_far.release()
        return step

    with Loader(read, stop=100, workers=2, prefetch=3) as loader:
        assert started == [], "nothing is read before the first step is asked for"
        loader.step(5)
        for _ in range(4):  # 5 and the three after it
            read_so_far.acquire(timeout=60)
        assert sorted(started) == [5, 6, 7, 8]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_raised_at_the_step_that_needs_the_data(workers: int) -> None:
    def read(step: int) -> int:
        if step == 2:
            raise DataError("step 2 is damaged")
        return step

    loader = Loader(read, stop=5, workers=workers, prefetch=4)
    assert [loader.step(0), loader.step(1)] == [0, 1]
    with pytest.raises(DataError, match="step 2 is damaged"):
        loader.step(2)
    loader.close()
    assert data_threads() == []
