"""What a rank holds during a step is what the simulator says, counted in real bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megalite.schedules import Action, Durations, Schedule, simulate
from megalite.schedules.memory import MicrobatchMemory, memory_over_time, peak_memory
from megalite.train.engine import Engine
from tests.parity.case import Case, config_of, rank_batches
from tests.pool import RankPool
from tests.tensor_parallel.kit.memory import AllocationMeter

pytestmark = pytest.mark.long

PP, MICRO_BATCHES = 4, 9
# gpipe with one chunk, as in the publications
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]


def step_bytes(ctx: Any, name: str, vpp: int) -> tuple[float, list[tuple[float, float]]]:
    """Most bytes between two actions of a step; and per stage of this rank what one microbatch
    holds after its forward and after its input gradient, measured on stages by themselves.
    """
    mesh = ctx.mesh(pp=PP)
    case = Case(pp=PP, vpp=vpp, schedule=name, m=MICRO_BATCHES, micro_batch=4)
    engine = Engine(config_of(case, 3 * PP * vpp), mesh)
    batches = rank_batches(case, 0, 0)
    engine.train_step(batches, 0.0)  # what is made once is there afterwards
    runtime, most = engine.runtime, 0

    def look(_action: Action) -> None:
        nonlocal most
        current = runtime._pass
        assert current is not None
        sends = runtime._channels._sends  # gloo keeps a message until its send is waited for
        handles = [*sends, *current._received.values()]  # and those posted ahead
        messages = sum(handle._result.untyped_storage().nbytes() for handle in handles)
        most = max(most, meter.alive_bytes - messages)

    runtime._callbacks = dataclasses.replace(runtime._callbacks, on_action=look)
    steps = []  # a message that is still on its way can only add to one: the least of three counts
    for _ in range(3):
        most = 0
        engine.optimizer.begin_step()
        with AllocationMeter() as meter:
            runtime.run(batches)
        engine.optimizer.step(0.0)
        steps.append(most)
    return min(steps), [stage_bytes(chunk, batches[0]) for chunk in engine.chunks]


def stage_bytes(chunk: Any, batch: Any) -> tuple[float, float]:
    """Bytes alive after a forward of a chunk and, backward split, after its input gradient."""
    hidden, tokens = chunk.config.hidden_size, len(batch.token_T)
    x = None if chunk.first else torch.randn(tokens, hidden, dtype=torch.float64)
    queue: list[Any] = []
    with AllocationMeter() as meter:
        x = None if x is None else x.requires_grad_()
        y = chunk.forward(x, batch)
        after_forward = meter.alive_bytes
        chunk.grads.deferred = queue
        y.backward(torch.ones_like(y))
        chunk.grads.deferred = None
        del y
        x = None
        after_backward = meter.alive_bytes
    return after_forward, after_backward


def predicted(schedule: Schedule, held: list[tuple[float, float]]) -> list[float]:
    weights = tuple(MicrobatchMemory(activations, 0.0, deferred) for activations, deferred in held)
    line = simulate(schedule, Durations.even(schedule.p, schedule.v))
    return [peak_memory(rank) for rank in memory_over_time(schedule, line, weights)]


@pytest.mark.parametrize(("name", "vpp"), SCHEDULES)
def test_bytes_held_follow_the_simulated_peak(pool: RankPool, name: str, vpp: int) -> None:
    from megalite.schedules import build

    schedule = build(name, PP, vpp, MICRO_BATCHES)
    results = pool.run(step_bytes, PP, name, vpp)
    held: list[tuple[float, float]] = [(0.0, 0.0)] * schedule.num_stages
    for rank, (_, mine) in enumerate(results):
        for stage, weights in zip(schedule.stages_of(rank), mine, strict=True):
            held[stage] = weights
    for rank, expected in enumerate(predicted(schedule, held)):
        assert results[rank][0] == pytest.approx(expected, rel=0.05), (name, rank)
