"""Column- and row-parallel layers against plain autograd, at every tp and with any strides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.context import LayerContext, ShardedModule
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.pool import traffic
from tests.tensor_parallel.kit.pieces import (
    LAYOUTS,
    Outcome,
    draw,
    fill,
    gradients_of,
    present,
    relative_error,
    tensor_parallel,
    tokens_of,
    transposed,
    whole_gradient,
    whole_tokens,
)
from tests.tolerances import PLAIN_FLOAT64

TOKENS, WIDTH, FEATURES = 12, 8, 20


@dataclass(frozen=True)
class Case:
    """What a layer is given and how it is run; `strides` is of input and upstream gradient."""

    kind: str  # column, packed (three feature dims, the middle one sharded), row or gated
    bias: bool = True
    strides: str = "rows"  # transposed; expanded: the stride-0 gradient that sum() sends
    keep_activation: bool = True
    frozen: bool = False
    overlap: bool = True
    defer: bool = False
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        plain = vars(Case(self.kind))
        changed = [f"{k}={v}" for k, v in vars(self).items() if v != plain[k]]
        return " ".join([self.kind, *changed])

    @property
    def is_column(self) -> bool:
        return self.kind in ("column", "packed")

    @property
    def weight_shape(self) -> tuple[int, ...]:
        shapes = {"column": (FEATURES, WIDTH), "packed": (2, 4, 5, WIDTH)}
        return shapes.get(self.kind, (WIDTH, FEATURES))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of the whole input; the gated one is [T, 2, F]: gates, then what they let through."""
        if self.is_column:
            return (TOKENS, WIDTH)
        return (TOKENS, 2, FEATURES) if self.kind == "gated" else (TOKENS, FEATURES)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (TOKENS, *self.weight_shape[:-1])

    @property
    def cut_dim(self) -> int:
        return {"column": 0, "packed": 1}.get(self.kind, -1)


CASES = [
    *(Case(kind) for kind in ("column", "packed", "row", "gated")),
    *(Case(kind, bias=False) for kind in ("column", "row")),
    Case("gated", keep_activation=False),
    *(
        Case(kind, strides=strides)
        for kind in ("column", "packed", "row", "gated")
        for strides in ("transposed", "expanded")
    ),
]


def build(case: Case, context: LayerContext) -> ShardedModule:
    shape = case.weight_shape
    layer: ColumnParallelLinear | RowParallelLinear
    if case.is_column:
        bias = ShardSpec("layer.bias", shape[:-1], case.cut_dim)
        weight = ShardSpec("layer.weight", shape, case.cut_dim)
        layer = ColumnParallelLinear(context, weight, bias if case.bias else None)
    else:
        partial = context.sequence_parallel  # each rank adds the bias to its own tokens
        bias = ShardSpec("layer.bias", shape[:1], partial=partial)
        layer = RowParallelLinear(
            context,
            ShardSpec("layer.weight", shape, 1),
            bias if case.bias else None,
            activation="swiglu" if case.kind == "gated" else None,
            keep_activation=case.keep_activation,
        )
    fill(layer)
    layer.weight.requires_grad_(not case.frozen)
    return layer


def upstream(case: Case) -> Tensor:
    ones = torch.ones((), dtype=torch.float64).expand(case.output_shape)
    return ones if case.strides == "expanded" else draw("dy", *case.output_shape).to(case.dtype)


def run_layer(ctx, sp: bool, case: Case) -> Outcome:
    """Forward and backward on this rank; features keep the dims of the whole ones."""
    context = tensor_parallel(ctx, sp, overlap=case.overlap, dtype=case.dtype)
    layer = build(case, context)
    heard: list[torch.nn.Parameter] = []
    context.grads.listener = heard.append
    context.grads.deferred = [] if case.defer else None
    x, dy = draw("x", *case.input_shape).to(case.dtype), upstream(case)
    if case.is_column:
        x, dy = tokens_of(x, context), dy.chunk(context.tp.size, 1 + case.cut_dim)[context.tp.rank]
    else:
        x, dy = x.chunk(context.tp.size, -1)[context.tp.rank], tokens_of(dy, context)
    x, dy = x.flatten(1), dy.flatten(1)
    if case.strides == "transposed":
        x, dy = transposed(x), transposed(dy)
    x = x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    notes: dict[str, Any] = {
        "heard at once": len(heard),
        "queued": len(context.grads.deferred or []),
    }
    for contribution in context.grads.deferred or []:
        contribution()
    notes["heard"] = sorted(a for p in heard for a in layer.specs if p is getattr(layer, a))
    notes["ledger"] = traffic(context.tp.ledger)
    y, dx = y.detach(), present(x.grad)
    if case.is_column:
        y = y.unflatten(1, layer.specs["weight"].local_shape(context.tp.size)[:-1])
    else:
        dx = dx.unflatten(1, (*case.input_shape[1:-1], -1))
    return Outcome(y, dx, gradients_of(layer), notes)


def serial(case: Case) -> dict[str, Tensor]:
    """The same in plain torch: output and all gradients."""
    x = draw("x", *case.input_shape).requires_grad_()
    weight = draw("layer.weight", *case.weight_shape).requires_grad_()
    bias = draw("layer.bias", *case.weight_shape[:-1]).requires_grad_()
    a = F.silu(x[:, 0]) * x[:, 1] if case.kind == "gated" else x
    y = torch.tensordot(a, weight, dims=([1], [weight.dim() - 1]))
    y = y + bias if case.bias else y
    y.backward(upstream(case))
    return {"output": y.detach(), "input": x.grad, "weight": weight.grad, "bias": bias.grad}


def whole(case: Case, sp: bool, outcomes: list[Outcome]) -> dict[str, Tensor]:
    """Output and all gradients of the whole layer, from all ranks' parts."""
    outputs, inputs = [o.output for o in outcomes], [present(o.input_grad) for o in outcomes]
    if case.is_column:
        found = {
            "output": torch.cat(outputs, 1 + case.cut_dim),
            "input": whole_tokens(inputs, sp),
        }
    else:
        found = {"output": whole_tokens(outputs, sp), "input": torch.cat(inputs, -1)}
    return found | {name: whole_gradient(outcomes, name) for name in outcomes[0].grads}


def assert_same_bits(a: list[Outcome], b: list[Outcome]) -> None:
    for mine, other in zip(a, b, strict=True):
        assert torch.equal(mine.output, other.output)
        assert torch.equal(present(mine.input_grad), present(other.input_grad))
        assert mine.grads.keys() == other.grads.keys()
        for name, (_, grad) in mine.grads.items():
            assert torch.equal(grad, other.grads[name][1]), name


@pytest.mark.parametrize(("tp", "sp"), LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_equals_plain_autograd(pool, case, tp, sp) -> None:
    got, want = whole(case, sp, pool.run(run_layer, tp, sp, case)), serial(case)
    assert got.keys() == want.keys() - (set() if case.bias else {"bias"})
    errors = {name: relative_error(value, want[name]) for name, value in got.items()}
    assert all(error <= PLAIN_FLOAT64 for error in errors.values()), errors


@pytest.mark.parametrize(("tp", "sp"), LAYOUTS)
@pytest.mark.parametrize("kind", ["column", "gated"])
def test_overlap_deferring_and_recompute_do_not_change_a_bit(pool, kind, tp, sp) -> None:
    plain = pool.run(run_layer, tp, sp, Case(kind))
    for changed in (
        Case(kind, overlap=False),
        Case(kind, defer=True),
        Case(kind, keep_activation=False),
    ):
        assert_same_bits(plain, pool.run(run_layer, tp, sp, changed))


@pytest.mark.parametrize("kind", ["column", "row"])
def test_only_the_weight_gradient_waits_and_each_contribution_is_heard_once(pool, kind) -> None:
    (now,) = pool.run(run_layer, 1, False, Case(kind))
    assert now.notes["queued"] == 0
    assert now.notes["heard at once"] == 2
    (later,) = pool.run(run_layer, 1, False, Case(kind, defer=True))
    assert later.notes["queued"] == 1
    assert later.notes["heard at once"] == 1
    assert now.notes["heard"] == later.notes["heard"] == ["bias", "weight"]


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, True)])
@pytest.mark.parametrize("kind", ["column", "gated"])
def test_frozen_weight_gets_no_gradient(pool, kind, tp, sp) -> None:
    free = pool.run(run_layer, tp, sp, Case(kind))
    frozen = pool.run(run_layer, tp, sp, Case(kind, frozen=True))
    for mine, other in zip(frozen, free, strict=True):
        assert mine.notes["heard"] == ["bias"]
        assert not mine.grads["weight"][1].any()
        assert torch.equal(mine.input_grad, other.input_grad)
        assert torch.equal(mine.grads["bias"][1], other.grads["bias"][1])


@pytest.mark.parametrize("kind", ["column", "row"])
def test_sixteen_bit_layers_sum_their_gradients_in_float32(pool, kind) -> None:
    outcomes = pool.run(run_layer, 2, True, Case(kind, dtype=torch.bfloat16))
    assert outcomes[0].output.dtype == torch.bfloat16
    assert {grad.dtype for o in outcomes for _, grad in o.grads.values()} == {torch.float32}
    got, want = whole(Case(kind), True, outcomes), serial(Case(kind))
    errors = {name: relative_error(value, want[name]) for name, value in got.items()}
    assert all(error < 0.03 for error in errors.values()), errors  # inputs are rounded to 4e-3


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("sp", "keep"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("kind", ["column", "gated"])
def test_traffic_is_what_theory_says(pool, kind, sp, keep, tp) -> None:
    """One collective forward and one backward; sequence parallelism splits an all-reduce into two
    halves of the same bytes, and the column layer gathers its input again in the backward."""
    case = Case(kind, keep_activation=keep)
    half = (tp - 1) / tp * TOKENS * WIDTH * 8  # bytes that a rank sends in half an all-reduce
    if tp == 1:
        want = {}
    elif not sp:
        want = {"all_reduce/tp": {"calls": 1, "bytes_sent": 2 * half}}
    elif case.is_column:
        want = {
            "all_gather/tp": {"calls": 2, "bytes_sent": 2 * half},
            "reduce_scatter/tp": {"calls": 1, "bytes_sent": half},
        }
    else:
        want = {
            "all_gather/tp": {"calls": 1, "bytes_sent": half},
            "reduce_scatter/tp": {"calls": 1, "bytes_sent": half},
        }
    for outcome in pool.run(run_layer, tp, sp, case):
        assert outcome.notes["ledger"] == want


def test_a_second_backward_is_told_that_the_first_wrote_over_what_was_saved(pool) -> None:
    """The gradient of the activation takes the place of its input."""
    (message,) = pool.run(backward_twice, 1)
    assert "modified by an inplace operation" in message


def backward_twice(ctx) -> str:
    layer = build(Case("gated"), tensor_parallel(ctx, False))
    x = draw("x", *Case("gated").input_shape).flatten(1).requires_grad_()
    y = layer(x.clone())
    y.sum().backward(retain_graph=True)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"
