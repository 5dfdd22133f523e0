"""The switch for repeatable runs: environment and algorithms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.errors import ConfigError
from megalite.process.determinism import (
    WORKSPACE,
    determinism,
    prepare_deterministic,
    use_deterministic,
)
from tests.pool import RankPool


def test_the_workspace_is_set_unless_a_good_one_is_there() -> None:
    environ: dict[str, str] = {}
    prepare_deterministic(environ)
    assert environ == {WORKSPACE: ":4096:8"}
    environ = {WORKSPACE: ":16:8"}
    prepare_deterministic(environ)
    assert environ == {WORKSPACE: ":16:8"}
    with pytest.raises(ConfigError, match=f"{WORKSPACE}=:0:0; unset it, or use :4096:8 or :16:8"):
        prepare_deterministic({WORKSPACE: ":0:0"})


def switched(ctx: Any) -> tuple[bool, bool, bool]:
    """Runs in a rank: recorded before, while on, and whether the fill of new memory is off."""
    before = determinism()["algorithms"]
    use_deterministic(True)
    try:
        return (
            before,
            determinism()["algorithms"],
            # torch puts an object with this property in the module's place, unknown to its stubs
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        )
    finally:
        use_deterministic(False)


@pytest.mark.long
def test_algorithms_are_switched_for_the_process(pool: RankPool) -> None:
    assert pool.run(switched, 1) == [(False, True, False)]
