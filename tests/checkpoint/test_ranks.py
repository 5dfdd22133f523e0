"""The process-group ranks on real gloo processes, and how failures are told to all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.checkpoint import GroupRanks, NamedPiece, SingleRank, find_latest, load, save
from megalite.checkpoint.ranks import Ranks, on_all, on_first
from megalite.errors import CheckpointError
from megalite.layout.sharding import ShardSpec
from tests.checkpoint.kit import run_ranks


def in_gloo_rank(store: Path, rank: int, root: Path) -> None:
    """One of three processes: exchange bytes, agree on an error, save and load a matrix."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    ranks = GroupRanks()
    gathered = ranks.gather(b"x" * rank)
    assert gathered == ([b"", b"x", b"xx"] if rank == 0 else [])
    assert ranks.gather(b"") == ([b"", b"", b""] if rank == 0 else [])
    assert ranks.broadcast(b"\0from %d\xff" % rank) == b"\0from 0\xff"
    assert ranks.broadcast(b"" if rank == 0 else b"y") == b""
    ranks.barrier()
    with pytest.raises(CheckpointError, match="here: rank 2: ZeroDivisionError"):
        on_all(ranks, "here", lambda: 1 // (2 - rank))
    spec = ShardSpec("w", (5, 7))
    whole = torch.arange(35.0)
    low, high = 12 * rank, min(12 * rank + 12, 35)
    piece = NamedPiece.of_shard("master", spec, 1, 0, whole[low:high].clone(), low)
    save(root, 1, [piece], state={}, config="", layout={"dp": 3}, ranks=ranks)
    piece.data.zero_()
    found = find_latest(root, ranks)
    assert found is not None
    load(found, [piece], ranks)
    assert torch.equal(piece.data, whole[low:high])
    dist.destroy_process_group()


def test_three_gloo_processes(tmp_path: Path) -> None:
    children = []
    for rank in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                in_gloo_rank(tmp_path / "store", rank, tmp_path / "root")
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]


def test_the_same_failure_is_reported_once() -> None:
    def fail(ranks: Ranks) -> None:
        on_all(ranks, "doing this", lambda: 1 / 0)

    errors = run_ranks(4, fail)
    wanted = "doing this: rank 0 and 3 more: ZeroDivisionError: division by zero"
    assert [str(e) for e in errors] == [wanted] * 4
    for error in errors:
        assert isinstance(error, Exception)
        assert isinstance(error.__cause__, ZeroDivisionError)


def test_many_different_failures_are_cut_short() -> None:
    def fail(ranks: Ranks) -> None:
        on_all(ranks, "doing this", lambda: dict[int, int]()[ranks.rank])

    errors = run_ranks(5, fail)
    assert len({str(e) for e in errors}) == 1
    assert str(errors[0]).endswith("and 2 other failures")


def test_only_the_first_rank_works() -> None:
    def work(ranks: Ranks) -> bytes:
        return on_first(ranks, "that", lambda: b"from %d" % ranks.rank)

    assert run_ranks(3, work) == [b"from 0"] * 3
    assert work(SingleRank()) == b"from 0"
