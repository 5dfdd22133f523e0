"""All ranks of a world, one after another on the pretended device, and then side by side.

NCCL asks of a program what gloo does not: communicators are split off the world by all ranks
together, members launch the same operations in the same order, and whatever runs at once on the
device must be able to end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.kit import order
from tests.gpu.kit.case import Case
from tests.gpu.kit.record import record
from tests.gpu.kit.trace import Event, Trace

CASES = (
    Case("tp2 pp2 dp2 1f1b", tp=2, pp=2, dp=2),
    Case(
        "pp2 dp2 interleaved",
        pp=2,
        vpp=2,
        layers=2,
        dp=2,
        settings=("pipeline.schedule=interleaved",),
    ),
    Case("pp4 zb-v", pp=4, vpp=2, layers=2, micro_batches=4, settings=("pipeline.schedule=zb-v",)),
    Case("tied tp2 pp2", config="models/qwen3-0.6b", tp=2, pp=2),
    Case(
        "dp4 bfloat16",
        config="models/llama-1b",
        dp=4,
        settings=("optimizer.grad_reduce_dtype=bfloat16",),
    ),
    Case("dp2 zero 0", config="models/gpt2-124m", dp=2, settings=("optimizer.zero=0",)),
)
SHARED = Case(
    "one communicator for gather and edge", tp=1, dp=2, config="models/llama-1b", share_edge=True
)
NAMES = [case.name for case in CASES]


@pytest.fixture(scope="module")
def worlds(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trace]]:
    cases = [*CASES, SHARED]
    found = record(cases, library, tmp_path_factory.mktemp("nccl"))
    return {case.name: traces for case, traces in zip(cases, found, strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_ranks_split_the_world_alike(name: str, worlds: dict[str, list[Trace]]) -> None:
    assert order.split_faults(worlds[name]) == []


@pytest.mark.parametrize("name", NAMES)
def test_members_launch_the_same_operations(name: str, worlds: dict[str, list[Trace]]) -> None:
    traces = worlds[name]
    assert order.order_faults(traces) == []
    assert [fault for trace in traces for fault in trace.faults] == []
    assert all(sum(event.kind == "collective" for event in trace.events) > 9 for trace in traces)


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_operations_end_with_a_stream_each_and_in_one_queue(
    name: str, serial: bool, worlds: dict[str, list[Trace]]
) -> None:
    assert order.unfinished(worlds[name], serial=serial) == []


@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_what_runs_on(name: str, worlds: dict[str, list[Trace]]) -> None:
    for trace in worlds[name]:
        assert order.overlap_faults(trace) == []


def test_operations_run_beside_kernels(worlds: dict[str, list[Trace]]) -> None:
    """Both collectives of a column-parallel backward have a product beside them, all buckets but
    the last the rest of the backward, and the gather of parameters the next step's forward.
    """
    for trace in worlds["tp2 pp2 dp2 1f1b"]:
        products = order.hidden_kernels(trace, "tensor_parallel/linear.py _ColumnLinear.backward")
        assert min(products) > 0
        buckets = order.hidden_kernels(trace, "optim/grad_reduce.py")
        assert len(buckets) > 4
        assert sum(count == 0 for count in buckets) <= 2  # the last of each of two steps
        gathers = order.hidden_kernels(trace, "optim/param_gather.py")
        assert min(gathers[: len(gathers) // 2]) > 10  # the second step's are waited for at the end


def test_an_edge_behind_the_gather_is_seen(worlds: dict[str, list[Trace]]) -> None:
    """Without a communicator of its own the step's edge, and the count of tokens, queue there."""
    for trace in worlds[SHARED.name]:
        faults = order.overlap_faults(trace)
        assert any("Trainer._agree" in fault and "ParamGather" in fault for fault in faults)


# --- what the analysis sees, on programs written by hand ------------------------------------------


def launch(op: int, comm: str, name: str = "all_reduce", detail: str = "8") -> Event:
    return Event("collective", name, op=op, comm=comm, detail=detail)


def wait(op: int, comm: str) -> Event:
    return Event("wait", "all_reduce", op=op, comm=comm)


def world(*programs: list[Event]) -> list[Trace]:
    return [Trace(rank, events) for rank, events in enumerate(programs)]


def test_another_order_and_another_size_are_seen() -> None:
    one = [launch(0, "0,1 #0", detail="8"), launch(1, "0,1 #0", detail="4")]
    other = [launch(0, "0,1 #0", detail="4"), launch(1, "0,1 #0", detail="8")]
    assert order.order_faults(world(one, one)) == []
    assert order.order_faults(world(one, other)) != []
    assert order.order_faults(world(one, one[:1])) != []
    assert order.order_faults(world(one, [])) != []


def test_two_communicators_in_two_orders_end_only_with_streams() -> None:
    one = [launch(0, "0,1 #0"), launch(1, "0,1 #1"), wait(0, "0,1 #0"), wait(1, "0,1 #1")]
    other = [launch(0, "0,1 #1"), launch(1, "0,1 #0"), wait(0, "0,1 #1"), wait(1, "0,1 #0")]
    assert order.unfinished(world(one, other), serial=False) == []
    assert len(order.unfinished(world(one, other), serial=True)) == 2
    # With waits between the launches streams do not help either.
    late = [other[0], other[2], other[1], other[3]]
    early = [one[0], one[2], one[1], one[3]]
    assert len(order.unfinished(world(early, late), serial=False)) == 2


def test_a_split_that_overlaps_is_seen() -> None:
    def split(*rounds: str) -> list[Event]:
        return [Event("split", name) for name in rounds]

    good = split("[[0, 1]]", "[[0], [1]]")
    assert order.split_faults(world(good, good)) == []
    assert order.split_faults(world(good, good[:1])) != []
    twice = split("[[0, 1], [1]]")
    assert order.split_faults(world(twice, twice)) != []
