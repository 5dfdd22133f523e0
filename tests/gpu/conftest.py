"""The shim, compiled once; where it cannot be, the tests that need it are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.kit import shim


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config) -> Path:
    """The shim's library, from the cache if it is there."""
    return built(shim.GUARD, pytestconfig)


@pytest.fixture(scope="session")
def values(pytestconfig: pytest.Config) -> Path:
    """The library of the operators that compute, from the cache if it is there."""
    return built(shim.VALUES, pytestconfig)


def built(source: Path, config: pytest.Config) -> Path:
    reason = shim.missing()
    if reason is not None:
        pytest.skip(reason)
    return shim.build(source, config.cache.mkdir("gpu"))
