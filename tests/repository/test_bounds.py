"""A test that waits for what never comes fails, and the next ones run."""

from __future__ import annotations

import select

import pytest

from tests import conftest


def test_a_wait_without_end_is_an_error(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "BOUND_S", 1)
    with pytest.raises(TimeoutError, match="did not end within 1 s"):  # noqa: SIM117
        with conftest.bounded(request.node):
            select.select([], [], [])
