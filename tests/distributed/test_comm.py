"""Every collective against its definition, bit for bit, for layouts, dtypes and strides."""

from __future__ import annotations

import math
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megalite.distributed import comm
from megalite.distributed.ledger import Ledger
from megalite.distributed.mesh import Mesh
from megalite.layout.topology import Topology
from megalite.process.env import end_process, init_process
from megalite.process.launcher import Launch
from tests.pool import traffic

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]
STRIDES = ["rows", "transposed", "every_second", "reversed_view"]


def draw(rank: int, shape: tuple[int, ...], dtype: torch.dtype, strides: str) -> torch.Tensor:
    """Small whole numbers, so that every sum is exact in every dtype, laid out as asked."""
    generator = torch.Generator().manual_seed(100 + rank)
    values = torch.randint(-8, 9, shape, generator=generator).to(dtype)
    if strides == "transposed":
        return values.t().contiguous().t()
    if strides == "every_second":
        wide = torch.zeros(shape[0], 2 * shape[1], dtype=dtype)
        wide[:, ::2] = values
        return wide[:, ::2]
    if strides == "reversed_view":
        tall = torch.zeros(shape[0] + 3, *shape[1:], dtype=dtype)
        tall[2:-1] = values
        return tall[2:-1]
    return values


def collectives(ctx, shape, dtype, strides):
    """What differs from the definition, over all operations; empty if nothing does."""
    mesh = ctx.mesh(tp=ctx.world_size)
    axis, size = mesh.tp, ctx.world_size
    parts = [draw(rank, shape, dtype, strides) for rank in range(size)]
    total = torch.stack(parts).sum(0).to(dtype)
    top = torch.stack(parts).amax(0)
    rows = shape[0] // size
    mine = slice(ctx.rank * rows, (ctx.rank + 1) * rows)
    wrong = []

    def check(name, got, expected):
        if not (got.dtype == expected.dtype and torch.equal(got, expected)):
            wrong.append((name, got.shape, expected.shape))

    def again():
        return draw(ctx.rank, shape, dtype, strides)

    x, y = again(), again()
    assert comm.all_reduce(x, axis) is x
    assert comm.start_all_reduce(y, axis).wait() is y
    check("all_reduce", x, total)
    check("started all_reduce", y, total)
    x = again()
    comm.all_reduce(x, axis, "max")
    check("max", x, top)
    x = again()
    check("all_gather", comm.all_gather(x, axis), torch.cat(parts))
    check("started all_gather", comm.start_all_gather(x, axis).wait(), torch.cat(parts))
    check("reduce_scatter", comm.reduce_scatter(x, axis), total[mine])
    check("started reduce_scatter", comm.start_reduce_scatter(x, axis).wait(), total[mine])
    check("input kept", x, parts[ctx.rank])
    flat = x.contiguous().clone()
    check("reduce_scatter_into", comm.start_reduce_scatter_into(flat, axis).wait(), total[mine])
    check("in place", flat[mine], total[mine])
    comm.start_all_gather_into(flat, axis).wait()
    check("all_gather_into", flat, total)
    for src in range(size):
        x = draw(ctx.rank, shape, dtype, strides)
        check("broadcast", comm.broadcast(x, axis, src), parts[src])
        check("broadcast in place", x, parts[src])
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_are_exact_also_on_strided_tensors(pool, world_size, strides, dtype) -> None:
    assert pool.run(collectives, world_size, (8, 3), dtype, strides) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("strides", ["rows", "transposed"])
def test_large_tensors_too(pool, world_size, strides) -> None:
    """Past the size where gloo's own ring takes over from the exchange."""
    shape = (1536, 128)
    assert shape[0] * shape[1] * 4 * world_size > comm._EXCHANGE_BYTES
    assert pool.run(collectives, world_size, shape, torch.float32, strides) == [[]] * world_size


def odd_shapes(ctx):
    mesh = ctx.mesh(tp=ctx.world_size)
    scalar = comm.all_reduce(torch.tensor(1.5), mesh.tp)
    empty = comm.all_reduce(torch.empty(0, 3), mesh.tp)
    gathered = comm.all_gather(torch.empty(0, 3), mesh.tp)
    scattered = comm.reduce_scatter(torch.empty(0, 3), mesh.tp)
    weight = torch.nn.Parameter(torch.ones(2))
    comm.all_reduce(weight.detach(), mesh.tp)
    return (
        float(scalar),
        list(empty.shape),
        list(gathered.shape),
        list(scattered.shape),
        (weight.tolist()),
    )


def test_scalars_empty_tensors_and_parameters(pool) -> None:
    expected = (3.0, [0, 3], [0, 3], [0, 3], [2.0, 2.0])
    assert pool.run(odd_shapes, 2) == [expected] * 2


def same_bits(ctx, numel):
    mesh = ctx.mesh(tp=ctx.world_size)
    torch.manual_seed(ctx.rank)
    x = torch.randn(numel) * 10.0 ** torch.randint(-3, 4, (numel,))
    runs = [comm.all_reduce(x.clone(), mesh.tp) for _ in range(2)]
    scattered = comm.reduce_scatter(x, mesh.tp)
    return torch.equal(*runs), runs[0], scattered


def test_a_reduction_gives_every_rank_the_same_bits_each_time(pool) -> None:
    answers = pool.run(same_bits, 4, 4096)
    assert all(again for again, _, _ in answers)
    assert all(torch.equal(reduced, answers[0][1]) for _, reduced, _ in answers)
    # The exchange adds in axis order in both, so ZeRO's sum is the all-reduce's.
    assert torch.equal(torch.cat([part for _, _, part in answers]), answers[0][1])


def many_in_flight(ctx):
    mesh = ctx.mesh(tp=2, dp=2)
    xs = [torch.full((5,), float(ctx.rank + i)) for i in range(6)]
    axes = [mesh.tp, mesh.dp] * 3
    handles = [comm.start_all_reduce(x, axis) for x, axis in zip(xs, axes, strict=True)]
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
    return [float(x[0]) for x in xs], all(handle.done() for handle in handles)


def test_handles_may_be_waited_for_in_any_order_and_twice(pool) -> None:
    for rank, (found, done) in enumerate(pool.run(many_in_flight, 4)):
        tp = [2 * (rank // 2 * 2) + 1, 2 * (rank % 2) + 2]
        assert found == [tp[i % 2] + 2 * i for i in range(6)]
        assert done


def objects(ctx):
    mesh = ctx.mesh(tp=2, dp=2)
    value = {"rank": ctx.rank, "text": "ü" * (ctx.rank * 50 + 1), "x": [0.1, math.inf, None]}
    return (
        comm.broadcast_object(value, mesh.dp, src=1),
        comm.all_gather_object(value, mesh.tp),
        comm.gather_object(value, mesh.tp),
    )


def test_objects_travel_as_json(pool) -> None:
    for rank, (broadcast, gathered, on_one) in enumerate(pool.run(objects, 4)):
        assert broadcast["rank"] == rank % 2 + 2
        assert broadcast["x"] == [0.1, math.inf, None]
        assert [entry["rank"] for entry in gathered] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert [len(entry["text"]) for entry in gathered] == [
            entry["rank"] * 50 + 1 for entry in gathered
        ]
        assert on_one == ([] if rank % 2 else gathered)


def traffic_of_everything(ctx):
    return everything_once(ctx.mesh(tp=2, dp=2))


def everything_once(mesh: Mesh) -> dict[str, dict[str, float]]:
    """One of each operation on the tp axis of two: shapes are checked, traffic is returned."""
    x = torch.zeros(4, 6)
    assert comm.all_reduce(x, mesh.tp).shape == (4, 6)
    assert comm.all_gather(x, mesh.tp).shape == (8, 6)
    assert comm.reduce_scatter(x, mesh.tp).shape == (2, 6)
    assert comm.start_all_gather_into(x, mesh.tp).wait().shape == (4, 6)
    assert comm.start_reduce_scatter_into(x, mesh.tp).wait().shape == (2, 6)
    assert comm.broadcast(x, mesh.tp).shape == (4, 6)
    comm.barrier(mesh.dp)
    assert comm.all_reduce(x, mesh.cp) is x
    return traffic(mesh.ledger)


def test_traffic_is_what_a_ring_would_send(pool) -> None:
    nbytes = 4 * 6 * 4
    expected = {
        "all_gather/tp": {"calls": 2, "bytes_sent": (2 * nbytes + nbytes) / 2},
        "all_reduce/tp": {"calls": 1, "bytes_sent": float(nbytes)},
        "barrier/dp": {"calls": 1, "bytes_sent": 4.0},
        "broadcast/tp": {"calls": 1, "bytes_sent": nbytes / 2},
        "reduce_scatter/tp": {"calls": 2, "bytes_sent": float(nbytes)},
    }
    assert pool.run(traffic_of_everything, 4) == [expected] * 4


def test_the_fake_backend_runs_the_same_calls_and_counts_the_same_traffic(pool) -> None:
    launch = Launch(rank=3, world_size=4)
    init_process(launch, torch.device("cpu"), 60.0, backend="fake")
    try:
        faked = everything_once(Mesh(Topology(tp=2, dp=2)))
    finally:
        end_process()
    assert faked == pool.run(traffic_of_everything, 4)[3]


def sent_bytes(ctx):
    mesh = ctx.mesh(pp=2)
    mesh.ledger.waits = []
    if mesh.pp.rank == 0:
        comm.isend(torch.zeros(3, 5, dtype=torch.bfloat16), mesh, 0, 1).wait()
    else:
        comm.irecv(torch.empty(3, 5, dtype=torch.bfloat16), mesh, 0, 1).wait()
    return traffic(mesh.ledger), [axis for axis, *_ in mesh.ledger.waits]


def test_messages_between_stages_count_on_the_pp_axis(pool) -> None:
    sent, received = pool.run(sent_bytes, 2)
    assert sent == ({"send/pp": {"calls": 1, "bytes_sent": 30.0}}, ["pp", "pp"])
    assert received == ({"recv/pp": {"calls": 1, "bytes_sent": 0.0}}, ["pp", "pp"])


def test_size_1_moves_nothing_and_counts_nothing() -> None:
    mesh = Mesh(Topology())
    mesh.ledger.waits = []
    x = torch.arange(6.0).view(2, 3)
    assert comm.all_gather(x, mesh.tp) is x
    assert comm.reduce_scatter(x, mesh.tp) is x
    assert comm.start_all_reduce(x, mesh.tp).wait() is x
    assert comm.start_all_gather_into(x, mesh.tp).wait() is x
    assert torch.equal(comm.start_reduce_scatter_into(x, mesh.tp).wait(), x)
    assert comm.broadcast_object({"a": 1}, mesh.world) == {"a": 1}
    assert comm.all_gather_object("a", mesh.world) == ["a"]
    assert comm.gather_object(("a",), mesh.world) == [["a"]]
    comm.barrier(mesh.world)
    assert not mesh.ledger.counts
    assert not mesh.ledger.waits


def refusals(ctx):
    mesh = ctx.mesh(tp=2)
    messages = []
    for call in (
        lambda: comm.reduce_scatter(torch.zeros(3, 2), mesh.tp),
        lambda: comm.start_all_gather_into(torch.zeros(4, 2).t(), mesh.tp),
        lambda: comm.all_reduce(torch.zeros(2), mesh.tp, cast(Any, "mean")),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_wrong_calls_are_refused_before_anything_is_sent(pool) -> None:
    for uneven, strided, unknown in pool.run(refusals, 2):
        assert "(3, 2) cannot be cut into 2 equal parts over the tp axis" in uneven
        assert "strides (1, 2)" in strided
        assert "'mean'; allowed are 'sum' and 'max'" in unknown


def one_rank_skips(ctx):
    """Rank 1 leaves its tp peer, rank 0, alone in the second all-reduce."""
    mesh = Mesh(Topology(tp=2, dp=2), timeout_s=10.0)
    comm.all_reduce(torch.ones(2), mesh.tp)
    mesh.ledger.phase = "backward"
    if ctx.rank != 0:
        return None
    try:
        comm.all_reduce(torch.ones(2), mesh.tp)
    except RuntimeError as error:
        return error.__notes__
    return "no error"


@pytest.mark.long
def test_a_hanging_collective_names_rank_place_and_phase(pool) -> None:
    notes = pool.run(one_rank_skips, 4)[0]
    assert notes == ["rank 0 (tp 0, dp 0): waiting in all_reduce on tp, op #2, phase 'backward'"]


class Work:
    """Takes the place of NCCL's: it keeps its output, and a wait does not wait for the device."""

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output
        self.result: torch.futures.Future[int] = torch.futures.Future()

    def wait(self) -> None:
        pass

    def get_future_result(self) -> torch.futures.Future[int]:
        return self.result


def test_an_operation_is_followed_to_its_end_on_the_device_without_its_output() -> None:
    ledger = Ledger("rank 0")
    axis: Any = SimpleNamespace(name="tp", backend="nccl", ledger=ledger)
    op = ledger.start("all_reduce", "tp", 4.0)
    work = Work(torch.ones(4))
    kept, result = weakref.ref(work.output), work.result
    handle = comm.Handle(work.output, work, axis)
    handle.wait()
    del handle, work
    assert kept() is None
    assert ledger.progress().waits_in is op
    result.set_result(0)
    assert ledger.progress().waits_in is None
