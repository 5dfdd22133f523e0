"""The differentiable functions on interpreted kernels: every layout of memory, no value trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels import functional, rope_tables, select
from megalite.kernels.functional import operator
from megalite.kernels.plain.intervals import Intervals, document_intervals
from megalite.kernels.triton import grouped_gemm as triton_grouped_gemm
from megalite.kernels.triton.attention_tiles import tma_fits
from tests.kernels.kit import with_strides
from tests.kernels.triton.kit.inputs import assert_near, draw

CPU = torch.device("cpu")
MASK = document_intervals(torch.tensor([0, 3, 3, 7]), 7, window=3)
BOUNDS = [MASK.lo, MASK.up, MASK.key_lo, MASK.key_up]
COS, SIN = rope_tables(5, 6, 100.0, torch.float32, CPU)
LABEL = torch.tensor([0, 4, -100, 2, 1])
ROWS = functional.expert_rows(torch.tensor([[0, 2], [2, 1], [-1, 2], [1, 3]]), 4)


@pytest.fixture(autouse=True)
def _on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `functional` computes with in float32; float64 stays with plain torch."""
    kernels = {torch.float32: select("interpret"), torch.float64: select("reference")}
    monkeypatch.setattr(operator, "_of", lambda device, dtype: kernels[dtype])


def norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Any:
    return *functional.add_rms_norm(x, r, w), *functional.add_layer_norm(x, r, w, b)


def pointwise(h: Tensor, b: Tensor) -> Any:
    return functional.swiglu(h), functional.gelu(h, b), functional.dropout(h, (7, 9), 0.4, 5)


def rope(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return functional.rope(x, cos, sin, position)


def attention(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, up: Tensor, key_lo: Tensor, key_up: Tensor
) -> Any:
    return functional.attention(q, k, v, Intervals(lo, up, key_lo, key_up))


def loss(x: Tensor, label: Tensor, weight: Tensor) -> Any:
    return functional.cross_entropy(x, label, weight, z_loss=0.1, smoothing=0.2, vocab_size=5)


def experts(x: Tensor, w: Tensor, weight: Tensor, row: Tensor, offset: Tensor) -> Any:
    rows = functional.RowMap(row, offset)
    y = functional.grouped_linear(functional.permute(x, rows), w, rows)
    return functional.unpermute(y, rows, weight)


# function, and its arguments: those of float32 that are to be differentiated come first
CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "norm": (norm, [draw(3, 6), draw(3, 6, seed=1), draw(6), draw(6, seed=2)]),
    "pointwise": (pointwise, [draw(3, 6), draw(6)]),
    "rope": (rope, [draw(3, 2, 7), torch.tensor([3, 0, 1]), COS, SIN]),
    "attention": (
        attention,
        [draw(7, 4, 16), draw(7, 2, 16), draw(7, 2, 16, seed=1), *BOUNDS],
    ),
    "loss": (loss, [draw(5, 6), LABEL, draw(5).abs()]),
    "experts": (experts, [draw(4, 3), draw(4, 5, 3), draw(4, 2), *ROWS]),
}
LEAVES = {"norm": 4, "pointwise": 2, "rope": 1, "attention": 3, "loss": 1, "experts": 3}


def evaluate(name: str, arguments: list[Tensor], expanded: bool) -> list[Tensor]:
    """Outputs and gradients; `expanded`: of sums, whose gradients have strides of 0."""
    leaves = [x.detach().requires_grad_() for x in arguments[: LEAVES[name]]]
    out = CASES[name][0](*leaves, *arguments[LEAVES[name] :])
    outputs = list(out) if isinstance(out, tuple) else [out]
    wanted = [x for x in outputs if x.requires_grad]
    parts = [x.sum() if expanded else (x * x.detach().cos()).sum() for x in wanted]
    torch.stack(parts).sum().backward()
    return [*outputs, *(x.grad for x in leaves if x.grad is not None)]


def exactly(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("strides", ["transposed", "every_second", "expanded"])
@pytest.mark.parametrize("name", CASES)
def test_any_strides_and_gradients_of_sums(name: str, strides: str) -> None:
    arguments = CASES[name][1]
    if strides == "expanded" and name == "experts":
        arguments = [*(x[:1].expand(x.shape) for x in arguments[:3]), *arguments[3:]]
    elif strides == "expanded" and name == "attention":
        everything = [torch.tensor([bound], dtype=torch.int32).expand(7) for bound in (0, 7, 0, 7)]
        arguments = [arguments[0][:1].expand(7, 4, 16), *arguments[1:3], *everything]
    elif strides == "expanded":
        arguments = [x[:1].expand(x.shape) for x in arguments]
    else:
        arguments = [with_any_strides(x, strides) for x in arguments]
    want = evaluate(name, [exactly(x) for x in arguments], strides != "transposed")
    got = evaluate(name, arguments, strides != "transposed")
    for a, b in zip(got, want, strict=True):
        assert_near(a, b, torch.float32, backward=True)


def with_any_strides(x: Tensor, strides: str) -> Tensor:
    if x.is_floating_point():
        return with_strides(x, strides)
    wide = torch.stack([x, x + 1000], -1)  # neighbours that are no index of anything
    return wide[..., 0]


def test_masks_end_with_the_keys() -> None:
    """Bounds below 0 and past the last key are those of the keys, and read no memory beyond."""
    q, k = draw(5, 2, 16), draw(3, 1, 16)
    bounds = [torch.tensor(x, dtype=torch.int32) for x in ([-9] * 5, [90] * 5, [-9] * 3, [90] * 3)]
    want = evaluate("attention", [*(exactly(x) for x in (q, k, k)), *bounds], True)
    for a, b in zip(evaluate("attention", [q, k, k, *bounds], True), want, strict=True):
        assert_near(a, b, torch.float32, backward=True)


def test_what_only_the_device_knows_gives_nan_not_other_memory() -> None:
    """Positions past the tables and labels past the vocabulary, which a GPU does not report."""
    ops = select("interpret")
    turned = ops.rotate_heads(draw(3, 2, 7), COS, SIN, torch.tensor([4, 5, -1]))
    assert turned[0].isfinite().all()
    assert turned[1:, :, :6].isnan().all()
    logits, label = draw(4, 5), torch.tensor([4, 5, -1, -100])
    stats = ops.cross_entropy_stats(logits, label, 0, 5)
    for kernels in (ops, select("reference")):
        found, _ = kernels.cross_entropy_combine(stats[None], label, vocab_size=5)
        assert found.isnan().tolist() == [False, True, True, False]


def test_updates_write_where_they_are_told() -> None:
    """A 16-bit copy with gaps is refused, numbers of a step may lie apart."""
    ops = select("interpret")
    weight, grad, m, v = draw(8), draw(8, seed=1), torch.zeros(8), torch.zeros(8)
    options: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    hyper = torch.tensor([[1e-2, 9.0], [0.1, 9.0], [0.05, 9.0], [0.5, 9.0]])[:, 0]
    with pytest.raises(ValueError, match="low must be contiguous"):
        ops.adamw_(weight, grad, m, v, hyper, low=torch.zeros(16).bfloat16()[::2], **options)
    weight64, grad64, m64, v64 = weight.double(), grad.double(), m.double(), v.double()
    select("reference").adamw_(weight64, grad64, m64, v64, hyper.double(), **options)
    ops.adamw_(weight, grad, m, v, hyper, **options)
    for a, b in ((weight, weight64), (grad, grad64), (m, m64), (v, v64)):
        assert_near(a, b)


def test_descriptors_are_of_rows_that_do_not_overlap() -> None:
    whole, expanded = draw(4, 16), draw(1, 16).expand(4, 16)
    assert tma_fits(16, whole)
    assert not tma_fits(16, whole, expanded)
    assert triton_grouped_gemm._aligned(whole)
    assert not triton_grouped_gemm._aligned(whole, expanded)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    """It would be that of no kernel: 0 where it is a sum with others, without a word."""
    ops, q = select("interpret"), draw(3, 1, 16).requires_grad_()
    out = ops.attention(q, q, q, ops.attention_mask([0, 3], None, CPU))
    with pytest.raises(RuntimeError, match="leave out create_graph"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()
