"""Custom operators: torch's own checks, gradients, and whole graphs for torch.compile."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels import functional, rope_tables
from megalite.kernels.plain.intervals import document_intervals

CPU = torch.device("cpu")
MASK = document_intervals(torch.tensor([0, 3, 7]), 7, window=3)
COS, SIN = rope_tables(4, 6, 100.0, torch.float64, CPU)
LABEL = torch.tensor([0, 4, -100, 2, 1])
WEIGHT = torch.tensor([1.0, 0.5, 1.0, 0.0, 2.0], dtype=torch.float64)


EXPERT = torch.tensor([[0, 2], [2, 1], [-1, 2], [1, 3]])  # expert 3 of 4 is used last, once
ROWS = functional.expert_rows(EXPERT, 4)


def loss(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits, LABEL, WEIGHT, z_loss=0.1, smoothing=0.2, vocab_size=5)


def fused_loss(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear_cross_entropy(
        x, weight, LABEL, WEIGHT, z_loss=0.1, vocab_size=5, chunk_tokens=2
    )


# function of tensors, and their shapes
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rms_norm": (functional.rms_norm, [(2, 3, 5), (5,)]),
    "add_rms_norm": (functional.add_rms_norm, [(3, 5), (3, 5), (5,)]),
    "layer_norm": (functional.layer_norm, [(3, 5), (5,), (5,)]),
    "add_layer_norm": (functional.add_layer_norm, [(3, 5), (3, 5), (5,), (5,)]),
    "swiglu": (functional.swiglu, [(2, 3, 6)]),
    "gelu": (functional.gelu, [(3, 5)]),
    "bias_gelu": (lambda h, b: functional.gelu(h, b, erf=True), [(3, 5), (5,)]),
    "rope": (lambda x: functional.rope(x, COS, SIN), [(8, 2, 7)]),
    "rope_at": (
        lambda x: functional.rope(x, COS, SIN, torch.tensor([3, 0, 1])),
        [(3, 2, 6)],
    ),
    "dropout": (lambda x: functional.dropout(x, (7, 9), 0.4, 5), [(3, 5)]),
    "attention": (
        lambda q, k, v: functional.attention(q, k, v, MASK)[0],
        [(7, 4, 6), (7, 2, 6), (7, 2, 6)],
    ),
    "permute": (lambda x: functional.permute(x, ROWS), [(4, 5)]),
    "unpermute": (lambda y: functional.unpermute(y, ROWS), [(8, 5)]),
    "unpermute_weighted": (
        lambda y, w: functional.unpermute(y, ROWS, w),
        [(8, 5), (4, 2)],
    ),
    "grouped_linear": (lambda x, w: functional.grouped_linear(x, w, ROWS), [(8, 3), (4, 5, 3)]),
    "cross_entropy": (loss, [(5, 6)]),
    "linear_cross_entropy": (fused_loss, [(5, 3), (6, 3)]),
}


def draw(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    function, shapes = CASES[name]
    assert torch.autograd.gradcheck(function, draw(shapes, torch.float64))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_traces_whole_with_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    function, shapes = CASES[name]
    plain, traced = draw(shapes, dtype), draw(shapes, dtype)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    outputs = []
    for run, inputs in ((function, plain), (compiled, traced)):
        out = run(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        sum((x.float() ** 2).sum() for x in out).backward()
        outputs.append([*out, *(x.grad for x in inputs)])
    for a, b in zip(*outputs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_operators_pass_torchs_checks(name: str) -> None:
    function, shapes = CASES[name]
    called = record_calls(function, draw(shapes, torch.float32))
    assert called
    for operator, arguments in called:
        torch.library.opcheck(operator, arguments)


def record_calls(function: Callable[..., Any], inputs: list[Tensor]) -> list[tuple[Any, Any]]:
    """Every custom operator that a forward and its backward call, with the arguments."""
    seen: dict[str, tuple[Any, Any]] = {}

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "megalite":
                once = "_grad" in str(func)  # a gradient is not differentiated again
                copies = tuple(
                    x.detach().clone().requires_grad_(x.requires_grad and not once)
                    if isinstance(x, Tensor)
                    else x
                    for x in args
                )
                seen[str(func)] = (func, copies)
            return func(*args, **(kwargs or {}))

    with Recorder():
        out = function(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        sum(x.sum() for x in out).backward()
    return list(seen.values())


def test_optimizer_operators_pass_torchs_checks() -> None:
    weight, grad, m, v = (torch.rand(9) for _ in range(4))
    low = torch.empty(9, dtype=torch.bfloat16)
    hyper = torch.tensor([1e-2, 0.1, 0.05, 0.5])
    arguments = (weight, grad, m, v, hyper, 0.9, 0.95, 1e-8, 0.1, low)
    torch.library.opcheck(torch.ops.megalite.adamw_.default, arguments)
    torch.library.opcheck(torch.ops.megalite.sum_squares.default, (grad,))
    torch.library.opcheck(torch.ops.megalite.expert_rows.default, (EXPERT, 4))
    cast = (grad, torch.tensor(2.0), torch.bfloat16)
    torch.library.opcheck(torch.ops.megalite.scale_cast.default, cast)


def test_every_function_says_what_it_takes() -> None:
    for name in functional.__all__:
        value = getattr(functional, name)
        assert value.__module__.startswith("megalite.kernels")
        assert value.__doc__, name
        assert inspect.signature(value).parameters


def test_adamw_is_torchs() -> None:
    mine, theirs = (torch.linspace(-1, 1, 9, dtype=torch.float64) for _ in range(2))
    theirs.requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    m, v = torch.zeros_like(mine), torch.zeros_like(mine)
    low = torch.empty(9, dtype=torch.bfloat16)
    for step in range(1, 4):
        grad = torch.sin(torch.arange(9, dtype=torch.float64) * step)
        theirs.grad = grad * 0.5
        optimizer.step()
        hyper = torch.tensor([1e-2, 1 - 0.9**step, 1 - 0.95**step, 0.5], dtype=torch.float64)
        functional.adamw_(mine, grad, m, v, hyper, 0.9, 0.95, 1e-8, 0.1, low)
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=0)
    assert torch.equal(low, mine.bfloat16())


def test_saturating_cast() -> None:
    x = torch.tensor([1e6, -1e6, float("nan"), float("inf"), 0.3])
    got = functional.scale_cast(x, torch.tensor(2.0), torch.float8_e4m3fn).float()
    assert got[:2].tolist() == [448.0, -448.0]
    assert got[2].isnan()
    assert got[3] == 448.0
    assert got[4] == 0.625
