"""The pool itself: results, failures that do not hang, and a fresh set afterwards."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from megalite.distributed import comm
from tests.pool import MAX_MESHES, RankFailed


def whoami(ctx, extra):
    return ctx.rank, ctx.world_size, extra, torch.get_num_threads(), threading.active_count()


def test_results_come_in_rank_order_from_ranks_with_one_thread(pool) -> None:
    for world_size in (1, 2, 3, 8):
        found = pool.run(whoami, world_size, "x")
        assert found == [(rank, world_size, "x", 1, 1) for rank in range(world_size)]


def process_id(ctx):
    return os.getpid()


def test_ranks_live_on_between_runs(pool) -> None:
    assert pool.run(process_id, 2) == pool.run(process_id, 2)


def state_of(pid: int) -> str:
    """A letter: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_ranks_without_work_are_stopped(pool) -> None:
    pids = pool.run(process_id, 2)
    deadline = time.monotonic() + 60  # a stop is not at once
    while {state_of(pid) for pid in pids} != {"T"}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert pool.run(process_id, 2) == pids


def make_meshes(ctx, count):
    layouts = [{"tp": 4}, {"dp": 4}, {"pp": 4}, {"tp": 2, "dp": 2}, {"tp": 2, "pp": 2}]
    layouts += [{"dp": 2, "pp": 2}, {"cp": 2, "tp": 2}]
    for layout in layouts[:count]:
        ctx.mesh(**layout)
    return os.getpid()


def test_ranks_with_many_meshes_give_way_to_new_ones(pool) -> None:
    few = pool.run(make_meshes, 4, MAX_MESHES)
    assert pool.run(process_id, 4) == few
    assert pool.run(make_meshes, 4, MAX_MESHES + 1) == few
    assert not set(pool.run(process_id, 4)) & set(few)


def same_mesh(ctx):
    first = ctx.mesh(tp=2)
    comm.barrier(first.tp)
    second = ctx.mesh(tp=2)
    return first is second, dict(second.ledger.counts)


def test_meshes_are_kept_and_their_ledgers_start_from_zero(pool) -> None:
    assert pool.run(same_mesh, 2) == [(True, {})] * 2


def fails_in_one_rank(ctx):
    mesh = ctx.mesh(tp=2)
    if ctx.rank == 1:
        raise KeyError("the cause")
    comm.barrier(mesh.tp)


def test_a_raising_rank_is_reported_and_leaves_nobody_hanging(pool) -> None:
    before = pool.run(process_id, 2)
    with pytest.raises(RankFailed, match=r"(?s)1 of 2 ranks.*rank 1.*KeyError: 'the cause'"):
        pool.run(fails_in_one_rank, 2)
    assert not set(pool.run(process_id, 2)) & set(before)


def dies(ctx):
    if ctx.rank == 0:
        print("last words", flush=True)
        os._exit(3)


def test_a_rank_that_dies_is_reported_with_its_output(pool) -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 0.*the process died.*last words"):
        pool.run(dies, 2)


def never_answers(ctx):
    if ctx.rank == 1:
        threading.Event().wait()


@pytest.mark.long
def test_a_rank_that_does_not_answer_shows_its_stack(pool) -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1.*no answer within 1.*never_answers"):
        pool.run(never_answers, 2, timeout_s=1.0)


def test_functions_that_ranks_cannot_find_are_refused(pool) -> None:
    with pytest.raises(TypeError, match="top of its module"):
        pool.run(lambda ctx: None, 1)
    with pytest.raises(ValueError, match="1 to 8"):
        pool.run(process_id, 9)
