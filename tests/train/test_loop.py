"""What a run leaves behind in its process: no thread, however it ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megalite.config import RunConfig
from tests.pool import RankPool
from tests.train.kit.runs import make_config, make_trainer, write_tokens


def threads_left(ctx: Any, config: RunConfig) -> list[str]:
    """Runs in a rank: threads that were not there before a run that stops and one that fails."""
    before = set(threading.enumerate())
    stops, fails = make_trainer(ctx, config), make_trainer(ctx, config)
    assert stops.run(stop_at=1) == 75
    with (
        mock.patch.object(fails.engine.optimizer, "step", side_effect=ArithmeticError),
        pytest.raises(ArithmeticError),
    ):
        fails.run()
    return [thread.name for thread in threading.enumerate() if thread not in before]


@pytest.mark.long
def test_readers_of_data_end_with_the_run(pool: RankPool, tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", 24)
    assert pool.run(threads_left, 1, make_config(tmp_path, "run", data__workers=2)) == [[]]
