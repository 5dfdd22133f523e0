"""Axes, groups and channels: on gloo with messages through them, on the fake backend at scale."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megalite.distributed import comm
from megalite.distributed.mesh import Mesh, channel_rounds
from megalite.errors import ConfigError
from megalite.layout.topology import KINDS, Topology
from megalite.process.env import end_process, init_process
from megalite.process.launcher import Launch


@pytest.fixture
def fake_rank():
    """`fake_rank(topology, rank)`: the mesh of one rank of a world that is not there."""

    def make(topology: Topology, rank: int) -> Mesh:
        end_process()
        launch = Launch(rank=rank, world_size=topology.world_size)
        init_process(launch, torch.device("cpu"), 60.0, backend="fake")
        return Mesh(topology)

    yield make
    end_process()


def sums_over_axes(ctx, layout):
    mesh = ctx.mesh(**layout)
    result = {}
    for kind in KINDS:
        axis = mesh.axis(kind)
        x = torch.tensor([float(2**ctx.rank)], dtype=torch.float64)
        result[kind] = (int(comm.all_reduce(x, axis)), axis.rank, axis.size, axis.member)
    return result


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 8},
        {"dp": 8},
        {"pp": 8},
        {"tp": 2, "dp": 2, "pp": 2},
        {"tp": 2, "pp": 4},
        {"cp": 2, "dp": 2, "pp": 2},
    ],
    ids=str,
)
def test_each_group_joins_the_ranks_the_topology_says(pool, layout) -> None:
    topology = Topology(**layout)
    for rank, found in enumerate(pool.run(sums_over_axes, 8, layout)):
        for kind in KINDS:
            ranks = topology.group_of(kind, rank)
            member = kind != "embedding" or topology.has_embedding(rank)
            expected = (sum(2**r for r in ranks), ranks.index(rank), len(ranks), member)
            assert found[kind] == expected


def lazy_in_program_order(ctx):
    mesh = Mesh(Topology(tp=2, pp=2, dp=2), timeout_s=60.0)
    made = [mesh.num_groups_made]
    for name in ("pp", "tp", "tp", "dp_cp", "dp", "cp"):
        comm.barrier(mesh.axis(name))
        made.append(mesh.num_groups_made)
    return made


def test_groups_are_made_on_first_use_and_shared_by_axes_of_the_same_ranks(pool) -> None:
    # dp finds the group of dp_cp, since cp is 1; cp has size 1 and needs none.
    assert pool.run(lazy_in_program_order, 8) == [[0, 1, 2, 2, 3, 3, 3]] * 8


def uneven_use(ctx):
    """End stages have an embedding group and middle ones have none; then all make more groups."""
    mesh = Mesh(Topology(pp=4, tp=2), timeout_s=60.0)
    mesh.create("embedding")
    if mesh.embedding.member:
        comm.barrier(mesh.embedding)
    comm.barrier(mesh.tp)
    mesh.create("channels")
    comm.barrier(mesh.pp)
    return mesh.num_groups_made


def test_middle_stages_do_not_throw_the_others_out_of_step(pool) -> None:
    # Without a round for the middle stages, gloo's groups get names that do not meet, and hang.
    assert len(set(pool.run(uneven_use, 8))) == 1


def whole_world_axis(ctx):
    mesh = Mesh(Topology(dp=ctx.world_size))
    return mesh.dp.group is dist.group.WORLD, mesh.tp.group, mesh.num_groups_made


def test_an_axis_over_all_ranks_is_the_world_group(pool) -> None:
    assert pool.run(whole_world_axis, 2) == [(True, None, 0)] * 2


@pytest.mark.parametrize(
    ("topology", "own"),
    [(Topology(dp=4), True), (Topology(cp=2, dp=2), True), (Topology(tp=2, dp=2), False),
     (Topology(pp=2, dp=2), False), (Topology(tp=4), False)],
    ids=str,
)  # fmt: skip
def test_the_edge_of_a_step_does_not_queue_behind_the_gather(fake_rank, topology, own) -> None:
    mesh = fake_rank(topology, 1)
    mesh.create()
    assert mesh.edge.ranks == mesh.world.ranks
    assert mesh.edge.group is not mesh.dp_cp.group
    assert (mesh.edge.group is not mesh.world.group) == own
    assert mesh.axis("edge") is mesh.edge


def around_the_ring(ctx, layout):
    """Each stage sends its world rank both ways round; returns what it got and from where."""
    mesh = ctx.mesh(**layout)
    stage, num = mesh.pp.rank, mesh.pp.size
    nxt, prv = (stage + 1) % num, (stage - 1) % num
    inbox = [torch.zeros(1), torch.zeros(1)]
    handles = [
        comm.irecv(inbox[0], mesh, prv, stage),
        comm.isend(torch.tensor([float(ctx.rank)]), mesh, stage, nxt),
    ]
    if num > 2:
        handles += [
            comm.irecv(inbox[1], mesh, nxt, stage),
            comm.isend(torch.tensor([float(ctx.rank)]), mesh, stage, prv),
        ]
    for handle in handles:
        handle.wait()
    return [int(x) for x in inbox]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, {"pp": 2}), (3, {"pp": 3}), (4, {"pp": 4}), (8, {"pp": 4, "tp": 2}), (5, {"pp": 5})],
)
def test_channels_carry_messages_to_the_neighbours_of_the_column(pool, world_size, layout) -> None:
    topology = Topology(**layout)
    for rank, found in enumerate(pool.run(around_the_ring, world_size, layout)):
        column = topology.group_of("pp", rank)
        stage = column.index(rank)
        before = column[(stage - 1) % len(column)]
        after = column[(stage + 1) % len(column)] if len(column) > 2 else 0
        assert found == [before, after]


def crossing_directions(ctx):
    """Both ends send first; the receive goes into a transposed tensor."""
    mesh = ctx.mesh(pp=2)
    stage = mesh.pp.rank
    other = 1 - stage
    out = torch.full((4,), float(stage))
    sent = comm.isend(out, mesh, stage, other)
    inbox = comm.irecv(torch.empty(2, 2).t(), mesh, other, stage).wait()
    sent.wait()
    different = mesh.channel(0, 1) is not mesh.channel(1, 0)
    return different, inbox.tolist()


def test_the_two_directions_of_an_edge_are_two_groups(pool) -> None:
    assert pool.run(crossing_directions, 2) == [
        (True, [[1.0, 1.0], [1.0, 1.0]]),
        (True, [[0.0, 0.0], [0.0, 0.0]]),
    ]


@pytest.mark.parametrize("num_pp", range(1, 40))
def test_channel_rounds_hold_every_edge_once_and_no_rank_twice(num_pp: int) -> None:
    rounds = channel_rounds(num_pp)
    for edges in rounds:
        ranks = [rank for edge in edges for rank in edge]
        assert len(ranks) == len(set(ranks))
    found = [edge for edges in rounds for edge in edges]
    around = {(s, (s + 1) % num_pp) for s in range(num_pp)} if num_pp > 1 else set()
    assert sorted(found) == sorted(around | {(b, a) for a, b in around})
    assert len(rounds) <= 6


def test_a_rank_of_16384_makes_a_handful_of_groups(fake_rank, monkeypatch) -> None:
    topology = Topology(tp=8, dp=128, pp=16)
    mesh = fake_rank(topology, 9000)
    monkeypatch.setattr(Topology, "groups", lambda *a: pytest.fail("listed the whole world"))
    sizes: list[int] = []
    real = dist.new_group

    def new_group(ranks, **settings):
        sizes.append(len(ranks))
        return real(ranks, **settings)

    monkeypatch.setattr(dist, "new_group", new_group)
    assert mesh.num_groups_made == 0
    mesh.create()
    # tp, dp, pp, a round of embedding that this middle rank sits out, 4 of channels
    assert sorted(sizes) == sorted([8, 128, 16, 1, 2, 2, 2, 2])
    assert mesh.num_groups_made == len(sizes)
    assert mesh.tp.ranks == topology.group_of("tp", 9000)


def test_nccl_splits_the_world_with_all_groups_and_the_same_arguments_on_every_rank(
    fake_rank, monkeypatch
) -> None:
    topology = Topology(tp=2, dp=2, pp=3)
    calls: dict[int, list[list[list[int]]]] = {}
    urgent: list[str] = []
    nccl = SimpleNamespace(Options=lambda is_high_priority_stream: is_high_priority_stream)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)  # torch for CPUs has none
    for rank in range(topology.world_size):
        mesh = fake_rank(topology, rank)
        mesh.backend = "nccl"
        calls[rank] = []

        def split(split_ranks, timeout, pg_options, group_desc, rank=rank):
            calls[rank].append(split_ranks)
            urgent.extend([group_desc] if pg_options else [])
            assert pg_options in (True, None)  # None: as the world's
            assert timeout.total_seconds() == 600
            mine = any(rank in ranks for ranks in split_ranks)
            return dist.group.WORLD if mine else None

        monkeypatch.setattr(dist, "split_group", split)
        mesh.create()
    assert all(made == calls[0] for made in calls.values())
    for made in calls[0]:
        ranks = [rank for group in made for rank in group]
        assert len(ranks) == len(set(ranks))
    assert calls[0][0] == [list(ranks) for ranks in topology.groups("tp")]
    assert urgent == ["tp"] * topology.world_size


def test_the_group_of_tp_is_its_own_even_over_all_ranks(fake_rank) -> None:
    mesh = fake_rank(Topology(tp=4), 1)
    mesh.create()
    assert mesh.tp.ranks == mesh.world.ranks
    assert mesh.tp.group is not mesh.world.group


def test_torch_takes_the_options_of_a_group() -> None:
    assert "pg_options" in inspect.signature(dist.split_group).parameters


def test_groups_that_not_all_ranks_use_must_be_made_at_set_up(fake_rank) -> None:
    mesh = fake_rank(Topology(pp=4), 0)
    with pytest.raises(RuntimeError, match=r"mesh\.create\('embedding'\)"):
        _ = mesh.embedding.group
    with pytest.raises(RuntimeError, match=r"mesh\.create\('channels'\)"):
        mesh.channel(0, 1)
    mesh.create()
    assert mesh.embedding.group is not None
    with pytest.raises(ConfigError, match=r"has no channel 1->2; it has 0->1, 0->3, 1->0, 3->0"):
        mesh.channel(1, 2)


def test_a_lone_process_needs_no_process_group() -> None:
    mesh = Mesh(Topology())
    mesh.create()
    assert [mesh.axis(kind).group for kind in KINDS] == [None] * len(KINDS)
    assert mesh.embedding.member
    with pytest.raises(ConfigError, match=r"no mesh axis 'sp'"):
        mesh.axis(cast(Any, "sp"))


def test_a_layout_that_does_not_fit_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 4 ranks, but 1 were started"):
        Mesh(Topology(tp=4))
