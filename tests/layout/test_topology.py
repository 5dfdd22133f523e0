"""Rank arithmetic, against its definition and as a partition of worlds up to 16,384 ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.errors import ConfigError
from megalite.layout.topology import KINDS, Coords, Kind, Topology

SIZES = st.integers(min_value=1, max_value=4)


@st.composite
def layouts(draw: st.DrawFn) -> Topology:
    """Any sizes, and an ep that divides a stage."""
    dense = draw(st.builds(Topology, tp=SIZES, cp=SIZES, dp=SIZES, pp=SIZES))
    fitting = [ep for ep in range(1, dense.edp + 1) if dense.edp % ep == 0]
    return replace(dense, ep=draw(st.sampled_from(fitting)))


TOPOLOGIES = layouts()
VARYING: dict[Kind, set[str]] = {
    "tp": {"tp"},
    "cp": {"cp"},
    "dp": {"dp"},
    "pp": {"pp"},
    "dp_cp": {"dp", "cp"},
    "world": {"tp", "cp", "dp", "pp"},
    "edge": {"tp", "cp", "dp", "pp"},
    "ep": {"ep"},
    "edp": {"edp"},
}
LARGE = [
    Topology(tp=8, dp=128, pp=16),
    Topology(tp=8, cp=2, dp=64, pp=16),
    Topology(tp=1, dp=16384),
    Topology(tp=16384),
    Topology(pp=16384),
    Topology(tp=2, cp=4, dp=1024, pp=2),
    Topology(tp=3, cp=5, dp=7, pp=151),
    Topology(tp=8, dp=1, pp=2048),
]


@given(TOPOLOGIES)
def test_rank_is_the_stated_formula_and_coords_its_inverse(topology: Topology) -> None:
    places = product(range(topology.pp), range(topology.dp), range(topology.cp), range(topology.tp))
    for rank, (pp, dp, cp, tp) in enumerate(places):
        assert rank == tp + topology.tp * (cp + topology.cp * (dp + topology.dp * pp))
        edp, ep = divmod(tp + topology.tp * (cp + topology.cp * dp), topology.ep)
        assert topology.coords(rank) == Coords(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, edp=edp)


@given(TOPOLOGIES, st.sampled_from(sorted(VARYING)))
def test_a_group_holds_the_ranks_that_differ_only_in_its_axes(
    topology: Topology, kind: Kind
) -> None:
    grid = {"ep", "edp", "pp"} if kind in ("ep", "edp") else {"tp", "cp", "dp", "pp"}
    fixed = grid - VARYING[kind]
    for group in topology.groups(kind):
        coords = [topology.coords(rank) for rank in group]
        for axis in fixed:
            assert len({getattr(c, axis) for c in coords}) == 1
        size = 1
        for axis in VARYING[kind]:
            size *= getattr(topology, axis)
        assert len(group) == size == topology.size(kind)


@given(TOPOLOGIES, st.sampled_from(KINDS))
def test_group_of_agrees_with_groups(topology: Topology, kind: Kind) -> None:
    groups = topology.groups(kind)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    members = {rank: group for group in groups for rank in group}
    for rank in range(topology.world_size):
        assert topology.group_of(kind, rank) == members.get(rank, (rank,))


@pytest.mark.parametrize("topology", LARGE, ids=str)
def test_groups_of_every_kind_cover_each_rank_once(topology: Topology) -> None:
    world_size = topology.world_size
    for kind in KINDS:
        groups = topology.groups(kind)
        ranks = [rank for group in groups for rank in group]
        assert len(ranks) == len(set(ranks))
        if kind == "embedding":
            stage = world_size // topology.pp
            ends = {*range(stage), *range(world_size - stage, world_size)}
            assert set(ranks) == ends
        else:
            assert sorted(ranks) == list(range(world_size))
        assert all(list(group) == sorted(group) for group in groups)


@pytest.mark.parametrize("topology", LARGE, ids=str)
def test_group_of_at_scale(topology: Topology) -> None:
    last = topology.world_size - 1
    for kind in KINDS:
        members = {rank: group for group in topology.groups(kind) for rank in group}
        for rank in {0, 1, last // 3, last // 2, last - 1, last} - {-1}:
            assert topology.group_of(kind, rank) == members.get(rank, (rank,))


def test_a_tensor_parallel_group_is_consecutive_and_stays_in_a_node() -> None:
    topology = Topology(tp=8, dp=128, pp=16)
    assert all(g == tuple(range(g[0], g[0] + 8)) for g in topology.groups("tp"))
    assert all(len({rank // 8 for rank in g}) == 1 for g in topology.groups("tp"))


def test_experts_are_spread_over_a_stage_ep_fastest() -> None:
    topology = Topology(tp=2, dp=2, pp=2, ep=2)
    assert topology.groups("ep") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert topology.groups("edp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert Topology(tp=2, dp=2, ep=4).groups("ep") == [(0, 1, 2, 3)]
    assert Topology(tp=2, dp=2).groups("edp") == [(0, 1, 2, 3)]


def test_embedding_groups_join_first_and_last_stage() -> None:
    topology = Topology(tp=2, dp=2, pp=3)
    assert topology.groups("embedding") == [(0, 8), (1, 9), (2, 10), (3, 11)]
    assert topology.group_of("embedding", 5) == (5,)
    assert [topology.has_embedding(rank) for rank in (0, 5, 9)] == [True, False, True]
    assert Topology(tp=2).groups("embedding") == [(0,), (1,)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(tp=0, dp=-1), r"parallel\.tp=0.*\n.*parallel\.dp=-1"),
        (lambda: Topology(tp=True), r"parallel\.tp=True"),
        (lambda: Topology(tp=2).coords(2), r"rank 2 does not exist.*2 ranks.*0 to 1"),
        (lambda: Topology(tp=2).coords(-1), r"rank -1"),
        (lambda: Topology().groups(cast(Any, "sp")), r"'sp'; kinds are tp, cp"),
        (lambda: Topology(tp=2, dp=3, ep=4), r"ep=4 does not divide tp\*cp\*dp = 2\*1\*3 = 6"),
        (lambda: Topology(tp=4).require_world(6), r"needs 4 ranks, but 6.*multiple of .* 4"),
        (lambda: Topology(tp=2, pp=2, dp=4).require_world(8), r"needs 16 ranks, .*dp=2 would fit"),
        (lambda: Topology(tp=4).require_world(0), r"needs 4 ranks, but 0.*multiple of .* 4"),
    ],
)
def test_errors_carry_the_numbers(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_describe_leaves_out_axes_of_one() -> None:
    assert Topology(tp=2, dp=2, pp=2).describe(5) == "rank 5 (tp 1, dp 0, pp 1)"
    assert Topology().describe(0) == "rank 0"


def test_it_imports_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "from megalite.layout.topology import Topology; print(Topology(tp=2).world_size)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"
