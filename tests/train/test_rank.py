"""The end of a rank that a launcher started."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import pytest
import torch

from megalite.process.launcher import Launch
from megalite.train import rank
from megalite.train.rank import run_rank_and_exit


class Ended(BaseException):
    """Takes the place of the process's end."""


@pytest.mark.parametrize("fails", [True, False])
def test_a_rank_that_failed_gives_its_communicators_up_and_another_leaves_the_group(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def work(launch: Launch, device: torch.device) -> int:
        if fails:
            raise ValueError("the cause")
        return 0

    def end(code: int) -> NoReturn:
        done.append(f"ends with {code}")
        raise Ended

    def leave(board: Any, linger_s: float = 0.0) -> None:
        done.append("leaves the board")

    monkeypatch.setattr(rank, "init_process", lambda *arguments: None)
    monkeypatch.setattr(rank, "abort_process", lambda: done.append("aborts"))
    monkeypatch.setattr(rank, "end_process", lambda: done.append("leaves the group"))
    monkeypatch.setattr(rank, "_leave", leave)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended):
        run_rank_and_exit(work, Launch(), torch.device("cpu"), (), 60.0)
    if fails:
        assert done == ["aborts", "leaves the board", "ends with 1"]
        assert "ValueError: the cause" in capsys.readouterr().err
    else:
        assert done == ["leaves the board", "leaves the group", "ends with 0"]
