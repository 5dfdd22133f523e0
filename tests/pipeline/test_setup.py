"""What the runtime refuses, how it says so, and when it calls back."""

from types import SimpleNamespace

import pytest
import torch

from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError
from megalite.layout.topology import Topology
from megalite.pipeline import BoundarySpec, PipelineRuntime, runtime
from megalite.pipeline.interpreter import last_backward_starts
from megalite.schedules import build, family, lower, post_ahead
from tests.pipeline.kit import BOUNDARY, make_schedule, micro_batches, problems, stages_of


def set_up(ctx, odd, change):
    """Rank `odd` is configured differently; afterwards the same channels must still be clean."""
    mesh = ctx.mesh(pp=ctx.world_size)
    boundary, name, v, m = BOUNDARY, "gpipe", 1, 3
    if ctx.rank == odd:
        boundary = {
            "length": BoundarySpec((5, 4), torch.float64),
            "dtype": BoundarySpec((3, 4), torch.float32),
        }.get(change, BOUNDARY)
        name = "1f1b" if change == "schedule" else name
        m = 4 if change == "micro batches" else m
        v = 2 if change == "chunks" else v
    schedule = build(name, mesh.pp.size, v, m)
    try:
        PipelineRuntime(schedule, stages_of(mesh, schedule), mesh, boundary)
    except ConfigError as error:
        return str(error), problems(mesh, "1f1b", 1, 3)
    return "no error", []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("length", ["[3, 4] float64", "[5, 4] float64"]),
        ("dtype", ["[3, 4] float64", "[3, 4] float32"]),
        ("schedule", ["sha256"]),
        ("micro batches", ["m=3", "m=4"]),
        ("chunks", ["v=1", "v=2"]),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_differ_all_say_so_before_the_first_message(pool, world_size, change, words):
    answers = pool.run(set_up, world_size, 1, change)
    assert len({message for message, _ in answers}) == 1
    for message, left_over in answers:
        assert "pipeline rank 0: boundary" in message
        assert "pipeline rank 1: boundary" in message
        assert all(word in message for word in words), message
        assert left_over == []


def one_rank(name="gpipe", v=2, m=3, boundary=BOUNDARY, **hooks):
    mesh = Mesh(Topology())
    schedule = make_schedule(name, 1, v, m)
    stages = stages_of(mesh, schedule)
    return PipelineRuntime(schedule, stages, mesh, boundary, **hooks), stages


def test_receives_are_posted_ahead_on_cpu_alone(monkeypatch):
    program = lower(build("1f1b", 2, 1, 4))
    ran, _ = one_rank()
    monkeypatch.setattr(runtime, "require_same_program", lambda *setup: None)
    for device, expected in (("cpu", post_ahead(program)), ("cuda", program)):
        monkeypatch.setattr(ran, "_mesh", SimpleNamespace(device=torch.device(device)))
        assert ran._checked(program, forward_only=False) == expected
    assert post_ahead(program) != program


def test_counts_must_fit():
    mesh = Mesh(Topology())
    schedule = build("gpipe", 1, 2, 3)
    with pytest.raises(ConfigError, match="1 pipeline rank with 2 chunks each, got 1 rank and 1"):
        PipelineRuntime(schedule, stages_of(mesh, schedule)[:1], mesh, BOUNDARY)
    with pytest.raises(ConfigError, match="got 1 rank "):
        PipelineRuntime(build("gpipe", 2, 1, 3), stages_of(mesh, schedule), mesh, BOUNDARY)
    runtime, _ = one_rank()
    with pytest.raises(ConfigError, match="has 3 microbatches, got 2"):
        runtime.run(micro_batches(2))


def test_a_stage_that_raises_is_shown_in_its_program():
    runtime, stages = one_rank("gpipe")
    stages[1].forward = lambda _input, batch: torch.linalg.inv(0 * batch["x"].T @ batch["x"])
    # a documented name, which torch's module imports without exporting it
    error = torch.linalg.LinAlgError  # type: ignore[attr-defined]
    with pytest.raises(error, match="singular") as caught:
        runtime.run(micro_batches(3))
    where = "pipeline rank 0 of 1, action 4 of 14: F0.0 F0.1 F0.2 >>F1.0<< F1.1 F1.2 BW1.0 BW1.1"
    assert caught.value.__notes__ == [where]
    assert runtime.where() == where


def test_where_a_rank_is_can_be_asked_at_any_time():
    seen: list[str] = []
    runtime: PipelineRuntime
    runtime, _ = one_rank(v=1, m=1, on_action=lambda _: seen.append(runtime.where()))
    assert runtime.where() == "pipeline: not running"
    runtime.run(micro_batches(1))
    assert seen == [
        "pipeline rank 0 of 1, action 1 of 3: >>F0.0<< BW0.0 REDUCE0",
        "pipeline rank 0 of 1, action 2 of 3: F0.0 >>BW0.0<< REDUCE0",
        "pipeline rank 0 of 1, action 3 of 3: F0.0 BW0.0 >>REDUCE0<<",
    ]
    assert runtime.where() == "pipeline: not running"


def test_outputs_that_do_not_fit_are_refused():
    for boundary in (BoundarySpec((3, 5), torch.float64), BoundarySpec((3, 4), torch.float32)):
        runtime, _ = one_rank(boundary=boundary)
        with pytest.raises(ConfigError, match=r"stage 0 returned \[3, 4\] float64, but"):
            runtime.run(micro_batches(3))
    runtime, stages = one_rank()
    stages[1].last = False
    with pytest.raises(ConfigError, match=r"last stage \(1\) returned shape \[3, 4\]"):
        runtime.run(micro_batches(3))
    runtime, stages = one_rank()
    stages[1].forward = lambda _input, _batch: stages[1].weight.sum()
    with pytest.raises(ConfigError, match="stage 1 gave no gradient for its input"):
        runtime.run(micro_batches(3))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Split backwards without lag: W follows its B, so the last backward starts at the B.
        ("split 1 0", ["start 1 at B1.1", "reduce 1", "start 0 at B0.1", "reduce 0"]),
        ("gpipe", ["start 1 at BW1.1", "reduce 1", "start 0 at BW0.1", "reduce 0"]),
    ],
)
def test_callbacks_come_around_the_last_backward_of_each_chunk(name, expected):
    actions, calls = [], []
    runtime, _ = one_rank(
        name,
        m=2,
        on_action=lambda action: actions.append(str(action)),
        on_last_backward_start=lambda chunk: calls.append(f"start {chunk} at {actions[-1]}"),
        on_reduce=lambda chunk: calls.append(f"reduce {chunk}"),
    )
    for _ in range(2):
        calls.clear()
        runtime.run(micro_batches(2))
        assert calls == expected
    calls.clear()
    runtime.run_forward(micro_batches(2))
    assert calls == []


def test_last_backward_starts_after_held_back_weight_gradients():
    held_back = lower(family(2, 1, 3, lag=1))  # rank 1: ... B1.2 W1.1 W1.2
    assert [str(a) for a in last_backward_starts(held_back.ranks[1])] == ["W1.2"]
    assert [str(a) for a in last_backward_starts(held_back.ranks[0])] == ["B0.2"]


def test_a_step_after_an_error_starts_afresh():
    runtime, stages = one_rank("split 1 1")
    inner = stages[0].forward
    stages[0].forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        runtime.run(micro_batches(3))
    stages[0].forward = inner
    assert len(runtime.run(micro_batches(3))) == 3
    assert stages[0].grads.deferred is None
