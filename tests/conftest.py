"""Fixtures that every part's tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from hypothesis import settings

from tests.pool import RankPool

# The same examples on every run, and no clock: the machine may be busy.
settings.register_profile("megalite", deadline=None, derandomize=True)
settings.load_profile("megalite")

# Tests that fork after torch has computed would hang in the child's OpenMP with more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

BOUND_S = 900  # of each phase of a test, for one that hangs; those marked slow have none

_POOL = pytest.StashKey[RankPool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks",
        choices=("only", "none"),
        help="only the tests on the pool of ranks, which fill the machine; or all others",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Fork the pool's zygote while this process has one thread; it sleeps until a test asks."""
    # Under nohup it is ignored, and so it would be in the processes whose answer is tested.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.getoption("--ranks") != "none":
        config.stash[_POOL] = RankPool(max_world_size=8)


def _wants_ranks(item: pytest.Item) -> bool:
    return "pool" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--ranks")
    if part is not None:
        left_out = [item for item in items if _wants_ranks(item) != (part == "only")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _wants_ranks(item) == (part == "only")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the zygote import torch while the first tests run, if any test wants ranks."""
    if any(map(_wants_ranks, session.items)):
        session.config.stash[_POOL].preload()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _POOL in config.stash:
        config.stash[_POOL].close()
        del config.stash[_POOL]


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> RankPool:
    """Forked gloo ranks: `pool.run(fn, world_size, *args)` gives one result per rank."""
    return request.config.stash[_POOL]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    with bounded(item):
        return (yield)


@contextmanager
def bounded(item: pytest.Item) -> Generator[None, None, None]:
    """Raise TimeoutError in a test that waits for what never comes, such as a process's end."""

    def late(*_: object) -> None:
        raise TimeoutError(f"{item.nodeid} did not end within {BOUND_S} s")

    slow = item.get_closest_marker("slow") is not None
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(0 if slow else BOUND_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
