"""A step of the real trainer on tensors that say cuda:0: what it launches, and when the host waits.

Nothing is computed, so nothing here is about values. `BUDGET` is exact: lower it when launches are
saved; a number that rises needs a reason in the commit.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.gpu.kit.case import Case
from tests.gpu.kit.record import record
from tests.gpu.kit.trace import Event, Phase, Trace

CASES = (
    Case("llama tp2 pp2 dp2", tp=2, pp=2, dp=2, micro_batches=4, ranks=(0, 7), measured=True),
    Case(
        "llama tp8",
        tp=8,
        ranks=(0,),
        settings=("train.recompute=selective", "train.loss_chunk_tokens=256"),
    ),
    Case(
        "llama zb-v",
        pp=2,
        vpp=2,
        layers=2,
        micro_batches=4,
        ranks=(0,),
        settings=("pipeline.schedule=zb-v",),
    ),
    Case("gpt2", config="models/gpt2-124m", dp=2, ranks=(1,)),
    Case("llama dp8", config="models/llama-1b", dp=8, ranks=(3,)),
    Case("qwen3 tied tp2", config="models/qwen3-0.6b", tp=2, ranks=(1,)),
    Case(
        "mistral",
        config="models/mistral-7b",
        tp=2,
        dp=2,
        ranks=(0,),
        settings=("model.sliding_window=256", "data.document_masks=true"),
    ),
)
Row = tuple[int, int, int]


class Budget(NamedTuple):
    """The costs of a step's parts, each as kernels, operations between ranks, marks of the clock.

    layer: one layer in one microbatch. rest: forward and backward of a step without layers.
    buckets: their reduction and gather in it. edge: the step's edge and its data.
    """

    layer: Row
    rest: Row
    buckets: Row
    optimizer: Row
    edge: Row


BUDGET = {
    "llama tp2 pp2 dp2": Budget((27, 10, 20), (63, 16, 34), (1, 6, 12), (36, 8, 17), (2, 2, 7)),
    "llama tp8":         Budget((29, 10, 0), (115, 12, 0), (1, 0, 0), (36, 2, 0), (2, 2, 0)),
    "llama zb-v":        Budget((27, 0, 0), (99, 16, 0), (2, 0, 0), (59, 1, 0), (2, 2, 0)),
    "gpt2":              Budget((42, 0, 0), (77, 0, 0), (1, 2, 0), (26, 3, 0), (2, 2, 0)),
    "llama dp8":         Budget((27, 0, 0), (59, 0, 0), (1, 6, 0), (32, 7, 0), (2, 2, 0)),
    "qwen3 tied tp2":    Budget((45, 10, 0), (65, 12, 0), (1, 0, 0), (44, 2, 0), (2, 2, 0)),
    "mistral":           Budget((27, 10, 0), (72, 12, 0), (1, 8, 0), (43, 10, 0), (2, 2, 0)),
}  # fmt: skip

# When the host waits for the device in a step, and how often. Marks of the step's clock are read
# after the loss has been, when nothing is left to wait for.
SYNCS = {
    "item at train/batch.py count_valid_tokens": 1,
    "tolist at optim/norm.py global_norm": 1,
    "copy to the host at train/loop.py Trainer._agree": 1,
    "tolist at train/loop.py Trainer._agree": 1,
}
CLOCK = "event at record/step_clock.py StepClock._add"

# Copies from the host to the device in a step. Those of the batches and their mask are on a stream
# of their own, which the compute stream waits for.
COPIES = {
    "async at train/batch.py Upload._copy": 2,
    "async at kernels/triton/attention_backward.py document_mask": 1,
    "async at kernels/triton/adamw_plan.py OnePassAdamW.update": 1,
    "blocking at train/batch.py count_valid_tokens": 1,
    "blocking at train/loop.py Trainer._agree": 1,
}

# Operators of torch in a step: none that a GPU has no good kernel for, none that asks for values.
OPERATORS = frozenset(
    (
        *("mm", "addmm", "dot", "embedding"),
        *("add", "add_", "sub", "mul", "sum", "abs", "remainder", "cat", "stack", "index"),
        *("clone", "copy_", "_to_copy", "zero_", "zeros", "ones_like", "full_like", "arange"),
        *("clamp", "clamp_max", "minimum", "maximum", "where", "masked_fill_", "searchsorted"),
        *("le", "ge", "lt", "ne", "eq", "bitwise_and", "bitwise_or", "bitwise_not", "sort"),
    )
)
# Types of the factors and of the result of every matrix product: 16 bits in, and out but for
# weight gradients, which go straight into float32.
PRODUCTS = {
    "mm: bfloat16, bfloat16 -> bfloat16",
    "addmm: bfloat16, bfloat16, bfloat16 -> bfloat16",
    "addmm: float32, bfloat16, bfloat16 -> float32",
    "dot: float32, float32 -> float32",
}


class Recorded(NamedTuple):
    case: Case
    traces: list[Trace]
    deeper: Trace


@pytest.fixture(scope="module")
def recorded(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    cases = [*CASES, *(case.deeper() for case in CASES)]
    found = record(cases, library, tmp_path_factory.mktemp("gpu"))
    each = zip(CASES, found[: len(CASES)], found[len(CASES) :], strict=True)
    return {case.name: Recorded(case, traces, more[0]) for case, traces, more in each}


def each_case(function: object) -> object:
    return pytest.mark.parametrize("name", [case.name for case in CASES])(function)


def last_step(trace: Trace, case: Case) -> dict[str, Phase]:
    """The phases of the last step, in which nothing happens for the first time."""
    prefix = f"{case.steps} "
    phases = trace.phases()
    return {name.removeprefix(prefix): phases[name] for name in phases if name.startswith(prefix)}


def whole_step(trace: Trace, case: Case) -> Phase:
    return Phase([event for phase in last_step(trace, case).values() for event in phase.events])


@each_case
def test_nothing_that_may_never_happen_does(name: str, recorded: dict[str, Recorded]) -> None:
    """Every argument of a kernel and of a collective is on the device, every operation is waited
    for, and nothing touches what an operation between ranks has in flight.
    """
    for trace in recorded[name].traces:
        assert trace.faults == []
        assert len(trace.events) > 400


@each_case
def test_the_host_waits_only_where_it_must(name: str, recorded: dict[str, Recorded]) -> None:
    case, traces, _ = recorded[name]
    for trace in traces:
        step = last_step(trace, case)
        assert step["forward and backward"].of("sync") == []
        syncs = whole_step(trace, case).sites("sync")
        syncs.pop(CLOCK, None)
        assert syncs == SYNCS


@each_case
def test_copies_to_the_device_are_those_that_are_known(
    name: str, recorded: dict[str, Recorded]
) -> None:
    case, traces, _ = recorded[name]
    for trace in traces:
        assert whole_step(trace, case).sites("copy") == COPIES


@each_case
def test_operators_and_types_of_products_are_those_that_are_known(
    name: str, recorded: dict[str, Recorded]
) -> None:
    case, traces, _ = recorded[name]
    for trace in traces:
        kernels = whole_step(trace, case).names("kernel")
        plain = {kernel for kernel in kernels if not kernel.endswith("_kernel")}
        assert plain <= OPERATORS, plain - OPERATORS
        assert set(trace.products) <= PRODUCTS, set(trace.products) - PRODUCTS
        # One product for each weight gradient: as many as there are input gradients, but for the
        # first layer's input and a look-up.
        assert trace.products["addmm: float32, bfloat16, bfloat16 -> float32"] > 0


@each_case
def test_a_step_launches_what_its_budget_says(name: str, recorded: dict[str, Recorded]) -> None:
    case, traces, deeper = recorded[name]
    measured = budget_of(case, traces[0], deeper)
    row = ", ".join(map(str, measured))
    assert measured == BUDGET[name], f'now it is\n    "{name}": Budget({row}),'


def budget_of(case: Case, trace: Trace, deeper: Trace) -> Budget:
    """What a step costs; the cost of a layer is the difference that more layers make."""
    step, more = last_step(trace, case), last_step(deeper, case)
    inside = [phase["forward and backward"].events for phase in (step, more)]
    some, twice = (cost([event for event in events if not of_buckets(event)]) for events in inside)
    count = case.layers * case.micro_batches
    layer = tuple((b - a) // count for a, b in zip(some, twice, strict=True))
    assert twice == tuple(a + count * each for a, each in zip(some, layer, strict=True))
    kernels, collectives, marks = (a - count * each for a, each in zip(some, layer, strict=True))
    return Budget(
        (layer[0], layer[1], layer[2]),
        rest=(kernels, collectives, marks),
        buckets=cost([event for event in inside[0] if of_buckets(event)]),
        optimizer=cost(step["optimizer"].events),
        edge=cost([*step["step edge"].events, *step["data"].events]),
    )


def of_buckets(event: Event) -> bool:
    """True for what the optimizer does within forward and backward, once a step."""
    return event.site.startswith("optim/")


def cost(events: list[Event]) -> Row:
    counts = Counter(event.kind for event in events)
    return counts["kernel"], counts["collective"], counts["mark"]


def test_the_product_of_weight_gradients_is_that_of_older_torches() -> None:
    """The steps above call it as this torch has it; torch 2.11 and 2.12 have it the same.

    The text is that of their native_functions.yaml.
    """
    older = (
        "aten::addmm.dtype_out(Tensor self, Tensor mat1, Tensor mat2, ScalarType out_dtype, *, "
        "Scalar beta=1, Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)"
    )
    assert torch.ops.aten.addmm.dtype_out._schema == torch._C.parse_schema(older)
