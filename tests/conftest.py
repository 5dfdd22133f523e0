"""Fixtures that every part's tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.pool import RankPool

# The same examples on every run, and no clock: the machine may be busy.
settings.register_profile("megalite", deadline=None, derandomize=True)
settings.load_profile("megalite")

# Tests that fork after torch has computed would hang in the child's OpenMP with more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_POOL = pytest.StashKey[RankPool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks",
        choices=("only", "none"),
        help="only the tests on the pool of ranks, which fill the machine; or all others",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Fork the pool's zygote while this process has one thread; it sleeps until a test asks."""
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
