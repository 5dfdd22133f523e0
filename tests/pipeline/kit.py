"""A tiny model in float64, its one-process definition, and what a pipeline must reproduce of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalite.distributed.mesh import Mesh
from megalite.pipeline import BoundarySpec, PipelineRuntime
from megalite.schedules import Schedule, build, family, fuse, recompute

TOKENS, HIDDEN = 3, 4
BOUNDARY = BoundarySpec((TOKENS, HIDDEN), torch.float64)


class Store:
    """Sums of weight gradients by name, in the order in which they are added."""

    def __init__(self) -> None:
        self.deferred: list[Callable[[], None]] | None = None
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, compute: Callable[[], Tensor]) -> None:
        def accumulate() -> None:
            self.sums[name] = self.sums[name] + compute() if name in self.sums else compute()

        if self.deferred is None:
            accumulate()
        else:
            self.deferred.append(accumulate)


class Linear(torch.autograd.Function):
    """x W^T + b, the gradients of W and b going to a store; only W's is ever deferred."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, store: Store) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store = store
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.store.add("weight", lambda: grad.T @ x)
        queue, ctx.store.deferred = ctx.store.deferred, None
        ctx.store.add("bias", lambda: grad.sum(0))
        ctx.store.deferred = queue
        return grad @ weight, None, None, None


class TinyStage:
    """tanh(linear(x)); the last stage turns it into its share of a loss over all tokens."""

    def __init__(self, stage: int, num_stages: int, num_tokens: int) -> None:
        draw = torch.Generator().manual_seed(stage)
        new: dict[str, Any] = {"dtype": torch.float64, "generator": draw}
        self.weight = torch.randn(HIDDEN, HIDDEN, **new).requires_grad_()
        self.bias = torch.randn(HIDDEN, **new).requires_grad_()
        self.grads = Store()
        self.last = stage == num_stages - 1
        self.num_tokens = num_tokens

    def forward(self, input_tD: Tensor | None, micro_batch: dict[str, Tensor]) -> Tensor:
        x = micro_batch["x"] if input_tD is None else input_tD
        y = torch.tanh(Linear.apply(x, self.weight, self.bias, self.grads))
        return ((y - micro_batch["y"]) ** 2).sum() / self.num_tokens if self.last else y


def micro_batches(num: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(99)
    new: dict[str, Any] = {"dtype": torch.float64, "generator": draw}
    return [
        {"x": torch.randn(TOKENS, HIDDEN, **new), "y": torch.randn(TOKENS, HIDDEN, **new)}
        for _ in range(num)
    ]


def serial(num_stages: int, m: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Losses and each stage's gradient sums, microbatch after microbatch in one graph each."""
    stages = [TinyStage(stage, num_stages, m * TOKENS) for stage in range(num_stages)]
    losses = []
    for micro_batch in micro_batches(m):
        x: Tensor | None = None
        for stage in stages:
            x = stage.forward(x, micro_batch)
        assert x is not None
        x.backward()
        losses.append(x.detach())
    return losses, [stage.grads.sums for stage in stages]


def make_schedule(name: str, p: int, v: int, m: int) -> Schedule:
    """The user's schedules, `split f lag` and `fused f lag` of the family, `again` any of them."""
    kind, *numbers = name.split()
    if kind == "again":
        return recompute(make_schedule(name.partition(" ")[2], p, v, m))
    if not numbers:
        return build(name, p, v, m)
    schedule = family(p, v, m, f=float(numbers[0]), lag=float(numbers[1]))
    return fuse(schedule) if kind == "fused" else schedule


def stages_of(mesh: Mesh, schedule: Schedule) -> list[TinyStage]:
    num_tokens = schedule.m * TOKENS
    mine = schedule.stages_of(mesh.pp.rank)
    return [TinyStage(stage, schedule.num_stages, num_tokens) for stage in mine]


def same(mine: list[Any], expected: list[Any]) -> bool:
    return len(mine) == len(expected) and all(map(torch.equal, mine, expected))


def problems(
    mesh: Mesh, name: str, v: int, m: int, *, num_steps: int = 1, **hooks: Any
) -> list[str]:
    """What differs from one process, bitwise."""
    p = mesh.pp.size
    schedule = make_schedule(name, p, v, m)
    stages = stages_of(mesh, schedule)
    runtime = PipelineRuntime(schedule, stages, mesh, BOUNDARY, **hooks)
    losses, sums = serial(p * v, m)
    expected = losses if mesh.pp.rank == schedule.place[-1] else []
    case = f"{name} p={p} v={v} m={m} rank {mesh.pp.rank}"
    found = []
    for step in range(num_steps):
        for stage in stages:
            stage.grads.sums.clear()
        if not same(runtime.run(micro_batches(m)), expected):
            found.append(f"{case}: losses of step {step}")
        for number, stage in zip(schedule.stages_of(mesh.pp.rank), stages, strict=True):
            for key, value in sums[number].items():
                if not torch.equal(stage.grads.sums[key], value):
                    found.append(f"{case}: gradient {key} of stage {number}, step {step}")
    if m % 2 == 1 and not same(runtime.run_forward(micro_batches(m)), expected):
        found.append(f"{case}: evaluation losses")
    return found
