"""What the differentiable functions refuse, in words, and what they take all the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from megalite.kernels import Kernels, functional, rope_tables, select
from megalite.kernels.errors import BackendError
from megalite.kernels.functional import operator
from megalite.kernels.others.attention import attention_adapter
from megalite.kernels.plain.attention import attention as documents_attention
from megalite.kernels.plain.intervals import Intervals, document_intervals
from tests.kernels.kit import draw, relative_error

CPU = torch.device("cpu")
X, W, R = (draw(*shape, dtype=torch.float32) for shape in ((4, 6), (6,), (4, 6)))
Q, K = draw(7, 4, 8, dtype=torch.float32), draw(7, 2, 8, dtype=torch.float32)
COS, SIN = rope_tables(5, 8, 100.0, torch.float32, CPU)
MASK = document_intervals(torch.tensor([0, 3, 7]), 7)
LABEL = torch.tensor([0, 5, -100, 2])
ROWS = functional.expert_rows(torch.tensor([[0, 2], [2, 1], [-1, 2], [1, 3]]), 4)
HYPER = torch.tensor([1e-2, 0.1, 0.05, 1.0])
f = functional


def update(**changed: Any) -> None:
    flat = {name: torch.ones(5) for name in ("weight", "grad", "exp_avg", "exp_avg_sq")}
    numbers = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    f.adamw_(**{**flat, "hyper": HYPER, "low": None, **numbers, **changed})


def masked(**changed: Any) -> Any:
    bounds = {name: getattr(MASK, name) for name in ("lo", "up", "key_lo", "key_up")}
    return f.attention(Q, K, K, Intervals(**{**bounds, **changed}))


def loss(x: Tensor = X, label: Tensor = LABEL, **options: Any) -> Tensor:
    return f.cross_entropy(x, label, **options)


def fused(**options: Any) -> Tensor:
    return f.linear_cross_entropy(X, draw(6, 6, dtype=torch.float32), LABEL, **options)


def bounds(values: Any, tokens: int = 7, **options: Any) -> Intervals:
    return document_intervals(torch.tensor(values), tokens, **options)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no tensor": (lambda: f.rms_norm([1.0], W), TypeError, "x is a list"),  # type: ignore[arg-type]
    "integers": (lambda: f.rms_norm(X.long(), W), TypeError, "x is torch.int64, expected float32"),
    "complex": (lambda: f.sum_squares(X.to(torch.complex64)), TypeError, "x is torch.complex64"),
    "sparse": (lambda: f.swiglu(X.to_sparse()), TypeError, "expected dense"),
    "a number": (lambda: f.swiglu(X[0, 0]), ValueError, r"shape \(\), expected \(..., columns"),
    "float64 parameter": (lambda: f.rms_norm(X, W.double()), TypeError, "weight is torch.float64"),
    "broadcast weight": (lambda: f.rms_norm(X, W[:1]), ValueError, r"shape \(1,\), expected \(6\)"),
    "no columns": (lambda: f.rms_norm(X[:, :0], W[:0]), ValueError, r"\(4, 0\), expected columns"),
    "eps below 0": (lambda: f.rms_norm(X, W, -1e-5), ValueError, "eps=-1e-05, expected 0 or more"),
    "eps NaN": (lambda: f.layer_norm(X, W, W, float("nan")), ValueError, "eps=nan"),
    "broadcast residual": (lambda: f.add_rms_norm(X, R[:1], W), ValueError, "residual has shape"),
    "other residual": (lambda: f.add_layer_norm(X, R.half(), W, W), TypeError, "residual is"),
    "other device": (lambda: f.rms_norm(X, W.to("meta")), ValueError, "is on meta, the first"),
    "odd swiglu": (lambda: f.swiglu(X[:, :5]), ValueError, "5 columns, expected an even number"),
    "broadcast bias": (lambda: f.gelu(X, W[:1]), ValueError, "bias has shape"),
    "rank": (lambda: f.dropout(X[None], (1, 2), 0.5), ValueError, r"\(tokens, columns\)"),
    "a batch": (
        lambda: f.attention(Q[None], K, K, MASK),
        ValueError,
        r"\(queries, heads, head dim",
    ),
    "no key": (lambda: f.dropout(X, 7, 0.5), ValueError, "key=7, expected two words"),  # type: ignore[arg-type]
    "a list": (lambda: document_intervals([0, 7], 7), TypeError, "cu_seqlens is a list"),  # type: ignore[arg-type]
    "half a sequence": (lambda: f.rope(K, COS, SIN), ValueError, "7 tokens are no whole number"),
    "a rate": (lambda: update(hyper=1e-3), TypeError, "hyper is a float, expected a tensor"),
    "a factor": (
        lambda: f.scale_cast(X, 2.0, torch.float16),  # type: ignore[arg-type]
        TypeError,
        "scale is a float, expected a tensor",
    ),
    "p of 1": (lambda: f.dropout(X, (1, 2), 1.0), ValueError, "p=1.0, expected 0"),
    "p NaN": (lambda: f.dropout(X, (1, 2), float("nan")), ValueError, "p=nan"),
    "wide key": (lambda: f.dropout(X, (1, 1 << 32), 0.5), ValueError, "words of 32 bits"),
    "one word": (lambda: f.dropout(X, (1,), 0.5), ValueError, "two words"),  # type: ignore[arg-type]
    "wide tables": (lambda: f.rope(K[..., :6], COS, SIN), ValueError, "turn 8 elements, a head"),
    "16-bit tables": (lambda: f.rope(K, COS.half(), SIN.half()), TypeError, "cos is torch.float16"),
    "no tables": (lambda: f.rope(K, COS[:0], SIN[:0]), ValueError, "tables have no positions"),
    "far position": (
        lambda: f.rope(K, COS, SIN, torch.tensor([0, 1, 2, 3, 4, 5, 0])),
        ValueError,
        r"position\[5\] is 5, expected 0 to 4",
    ),
    "position below 0": (
        lambda: f.rope(K, COS, SIN, -torch.ones(7, dtype=torch.int32)),
        ValueError,
        r"position\[0\] is -1",
    ),
    "bool positions": (
        lambda: f.rope(K, COS, SIN, torch.ones(7, dtype=torch.bool)),
        TypeError,
        "position is torch.bool, expected int64, int32",
    ),
    "table's gradient": (
        lambda: f.rope(K, COS.clone().requires_grad_(), SIN),
        ValueError,
        "cos requires a gradient",
    ),
    "heads": (lambda: f.attention(Q[:, :3], K, K, MASK), ValueError, "3 query heads of 8 over 2"),
    "other keys": (lambda: f.attention(Q, K, K[1:], MASK), ValueError, "v has shape"),
    "mixed types": (lambda: f.attention(Q, K.half(), K, MASK), TypeError, "k is torch.float16"),
    "mask": (lambda: f.attention(Q, K, K, None), TypeError, "document_intervals makes"),  # type: ignore[arg-type]
    "mask of 1": (lambda: masked(lo=MASK.lo[:1]), ValueError, "mask.lo has shape"),
    "wide mask": (lambda: masked(key_up=MASK.key_up.long()), TypeError, "mask.key_up is"),
    "two masks": (
        lambda: masked(key_up=MASK.key_up.clamp_max(6)),
        ValueError,
        "query 6 see key 3: True, mask.key_lo and mask.key_up: False",
    ),
    "scale of 0": (lambda: f.attention(Q, K, K, MASK, 0.0), ValueError, "scale=0.0"),
    "window of 0": (lambda: bounds([0, 7], window=0), ValueError, "window=0, expected at least 1"),
    "late documents": (lambda: bounds([1, 7]), ValueError, r"boundaries \[1, 7\]"),
    "falling documents": (lambda: bounds([0, 5, 4]), ValueError, r"\[0, 5, 4\], expected"),
    "overrun": (lambda: bounds([0, 9]), ValueError, "end at 9, but there are 7 tokens"),
    "fractions": (lambda: bounds([0.0, 7.0]), TypeError, "cu_seqlens is torch.float32"),
    "no documents": (
        lambda: Kernels().attention_mask([], None, CPU),
        ValueError,
        r"boundaries \[\]",
    ),
    "late lists": (lambda: Kernels().attention_mask([2, 7], None, CPU), ValueError, r"\[2, 7\]"),
    "no window": (lambda: Kernels().attention_mask([0, 7], 0, CPU), ValueError, "window=0"),
    "short documents": (
        lambda: documents_attention(Q, K, K, [0, 1]),
        ValueError,
        "documents end at 1, but there are 7 tokens",
    ),
    "narrow labels": (lambda: loss(label=LABEL.int()), TypeError, "label is torch.int32"),
    "one label": (lambda: loss(label=LABEL[:1]), ValueError, "label has shape"),
    "far label": (
        lambda: loss(label=LABEL + 1),
        ValueError,
        r"label\[1\] is 6, expected 0 to 5 or",
    ),
    "padding label": (lambda: loss(vocab_size=5), ValueError, r"label\[1\] is 5, expected 0 to 4"),
    "wide vocabulary": (lambda: loss(vocab_size=7), ValueError, "vocab_size=7, expected 1 to 6"),
    "no vocabulary": (lambda: loss(X[:, :0]), ValueError, "vocab_size=0"),
    "smoothing": (lambda: loss(smoothing=1.5), ValueError, "smoothing=1.5, expected 0 to 1"),
    "z-loss": (lambda: loss(z_loss=-0.1), ValueError, "z_loss=-0.1, expected 0 or more"),
    "weight's gradient": (
        lambda: loss(weight_T=torch.ones(4).requires_grad_()),
        ValueError,
        "weight requires a gradient, .* pass weight.detach",
    ),
    "no chunks": (lambda: fused(chunk_tokens=0), ValueError, "chunk_tokens=0, expected 1 or more"),
    "fused label": (lambda: fused(vocab_size=5), ValueError, r"label\[1\] is 5"),
    "map": (lambda: f.permute(X, (1, 2)), TypeError, "what expert_rows gives"),  # type: ignore[arg-type]
    "other map": (lambda: f.permute(X[1:], ROWS), ValueError, r"x has shape \(3, 6\)"),
    "rows twice": (
        lambda: f.permute(X, f.RowMap(ROWS.row_TK[:1].expand(4, 2), ROWS.offset_E1)),
        ValueError,
        "permute: row does not hold each of 8 rows once; pass what expert_rows gives",
    ),
    "far rows": (
        lambda: f.unpermute(draw(8, 6), f.RowMap(ROWS.row_TK + 9, ROWS.offset_E1)),
        ValueError,
        "unpermute: row does not hold",
    ),
    "late experts": (
        lambda: f.grouped_linear(
            draw(8, 6), draw(3, 2, 6), f.RowMap(ROWS.row_TK, ROWS.offset_E1[1:])
        ),
        ValueError,
        r"offset is \[\d, .*expected to rise from 0 to at most 8",
    ),
    "no residual": (
        lambda: f.add_rms_norm(X, None, W),  # type: ignore[arg-type]
        TypeError,
        "residual is a NoneType",
    ),
    "fractional experts": (lambda: f.expert_rows(X, 4), TypeError, "expert is torch.float32"),
    "router weights": (lambda: f.unpermute(draw(8, 2), ROWS, W), ValueError, "weight has shape"),
    "experts": (
        lambda: f.grouped_linear(draw(8, 6), draw(3, 2, 6), ROWS),
        ValueError,
        "weight has",
    ),
    "step 0": (lambda: update(hyper=HYPER * 0), ValueError, "the first update is number 1"),
    "beta of 1": (lambda: update(beta2=1.0), ValueError, "beta2=1.0, expected 0 below 1"),
    "beta NaN": (lambda: update(beta1=float("nan")), ValueError, "beta1=nan"),
    "matrix": (lambda: update(weight=torch.ones(5, 1)), ValueError, "weight has shape"),
    "gaps": (lambda: update(low=torch.ones(10)[::2]), ValueError, "stride 2, expected flat"),
    "hyper": (lambda: update(hyper=HYPER[:3]), ValueError, r"hyper has shape \(3,\)"),
    "scales": (lambda: f.scale_cast(X, W, torch.half), ValueError, "expected one number"),
    "cast to int": (lambda: f.scale_cast(X, W[0], torch.int8), TypeError, "to torch.int8"),
    "odd tables": (lambda: rope_tables(4, 5, 1e4, torch.float32, CPU), ValueError, "rotary_dim=5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_what_it_got_and_what_it_takes(name: str) -> None:
    call, kind, told = REFUSED[name]
    with pytest.raises(kind, match=told):
        call()


def test_weights_may_want_a_gradient_where_none_is_computed() -> None:
    with torch.no_grad():
        loss(weight_T=torch.ones(4).requires_grad_())


def test_forward_mode_is_refused_not_zero() -> None:
    with pytest.raises(ValueError, match="h carries a forward-mode tangent"):
        torch.func.jvp(f.swiglu, (X,), (X,))
    with forward_ad.dual_level():
        with pytest.raises(ValueError, match="weight carries a forward-mode tangent"):
            f.rms_norm(X, forward_ad.make_dual(W, W))
        assert f.rms_norm(X, W).shape == X.shape


def test_documents_of_a_batch_by_vmap() -> None:
    starts = torch.tensor([[0, 3, 6], [0, 2, 6]])
    lo = torch.func.vmap(lambda cu: document_intervals(cu, 6).lo)(starts)
    assert lo.tolist() == [[0, 0, 0, 3, 3, 3], [0, 0, 2, 2, 2, 2]]


def test_smoothing_of_1_forgets_the_label() -> None:
    spread = loss(X.double(), torch.zeros(4, dtype=torch.int64), smoothing=1.0)
    want = -X.double().log_softmax(1).mean(1)
    assert relative_error(spread, want) < 1e-12


def test_no_rows_no_columns_and_one_element() -> None:
    empty, none = X[:0], X[:, :0]
    assert f.rms_norm(empty, W).shape == (0, 6)
    assert f.swiglu(none).shape == (4, 0)
    assert f.swiglu(X[None, :0]).shape == (1, 0, 3)
    assert f.gelu(none[0]).shape == (0,)
    assert f.rms_norm(torch.tensor([3.0]), torch.ones(1)).item() == pytest.approx(1.0)
    assert fused(chunk_tokens=1).shape == (4,)
    assert loss(empty, LABEL[:0]).shape == (0,)


def test_documents_without_tokens_change_nothing() -> None:
    for lengths, plain in (([0, 0, 3, 3, 3, 7, 7], [0, 3, 7]), ([0, 7, 7], [0, 7])):
        got, want = (documents_attention(Q, K, K, cu) for cu in (lengths, plain))
        assert torch.equal(got, want)
        make_mask, attend = attention_adapter("sdpa_flash", CPU)
        got, want = (attend(Q, K, K, make_mask(cu, None, CPU)) for cu in (lengths, plain))
        assert torch.equal(got, want)
    assert documents_attention(Q[:0], K[:0], K[:0], [0, 0]).shape == (0, 4, 8)


def test_rows_of_no_weight_get_no_gradient_whatever_they_hold() -> None:
    x = X.clone()
    x[1], x[2] = torch.nan, torch.inf
    x.requires_grad_()
    loss(x, weight_T=torch.tensor([1.0, 0.0, 1.0, 1.0])).nansum().backward()
    assert x.grad is not None
    assert x.grad[1:3].eq(0).all()
    assert x.grad[[0, 3]].ne(0).all()


AUTOCAST: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k: f.attention(q, k, k, MASK)[0],
    "loss": lambda q, k: f.linear_cross_entropy(
        q.flatten(1), k.flatten()[:96].view(3, 32), torch.zeros(7, dtype=torch.int64)
    ),
    "experts": lambda q, k: f.grouped_linear(
        q.flatten(1)[:6],
        k.flatten()[:64].view(1, 2, 32),
        f.expert_rows(torch.zeros(6, 1).long(), 1),
    ),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_changes_no_number(name: str) -> None:
    found = []
    for cast in (False, True):
        leaves = [x.detach().clone().requires_grad_() for x in (Q, K)]
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            out = AUTOCAST[name](*leaves)
            out.float().square().sum().backward()
        found.append([out, *(x.grad for x in leaves)])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_experts_are_sorted_by_the_devices_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
        asked.append(dtype)
        return Kernels()

    monkeypatch.setattr(operator, "_of", kernels)
    f.expert_rows(torch.zeros(2, 1, dtype=torch.int64), 1)
    assert asked == [torch.float32]


@pytest.mark.parametrize("strides", ["transposed", "expanded"])
def test_operators_promise_the_strides_they_give(strides: str) -> None:
    """torch.compile lays out memory by the promise; checked for gradients of odd strides, too."""

    def odd(x: Tensor) -> Tensor:
        if strides == "expanded":
            return x[:1].expand(x.shape)
        return x.mT.contiguous().mT

    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: f.rms_norm(x, W),
        lambda x: f.add_layer_norm(x, R, W, W)[0],
        lambda x: f.swiglu(x),
        lambda x: f.gelu(x, W),
        lambda x: f.dropout(x, (1, 2), 0.5),
        lambda x: f.permute(x, ROWS),
        lambda x: f.unpermute(torch.cat([x, x]), ROWS),
        lambda x: f.cross_entropy(x, LABEL),
    ]
    for function in functions:
        for recorded, arguments in record(function, odd):
            torch.library.opcheck(recorded, arguments, test_utils="test_faketensor")


def record(
    function: Callable[[Tensor], Tensor], odd: Callable[[Tensor], Tensor]
) -> list[tuple[Any, Any]]:
    """Every operator of ours that a forward and a backward call, with its arguments as they are.

    `odd` gives the function's input and the gradient of its output other strides.
    """
    seen: list[tuple[Any, Any]] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "megalite":
                seen.append((func, tuple(x.detach() if isinstance(x, Tensor) else x for x in args)))
            return func(*args, **(kwargs or {}))

    x = X.clone().requires_grad_()
    with Recorder():
        y = function(odd(x))
        y.backward(odd(torch.ones_like(y)) if y.dim() > 1 else torch.ones_like(y))
    assert len(seen) > 1
    return seen


def test_a_device_or_a_type_that_is_none_is_refused() -> None:
    assert select("auto", "cpu").name == "reference"
    with pytest.raises(BackendError, match="is no device"):
        select("auto", "gpu")
    with pytest.raises(BackendError, match=r"storage type is torch\.int64"):
        select("auto", CPU, torch.int64)
    with pytest.raises(BackendError, match="storage type is 'float32'"):
        select("auto", CPU, "float32")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match="finds no GPU"):
            select("triton", "cuda")


def test_a_broken_triton_is_told_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ModuleType("triton")
    broken.__spec__ = ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", broken)
    monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
    with pytest.raises(BackendError, match=r"cannot be imported .*knobs.*triton>=3\.6"):
        select("interpret")


def test_a_matrix_that_is_not_trained_costs_no_gradient_of_its_size() -> None:
    matrix, label = draw(6, 6, dtype=torch.float32), torch.tensor([0, 5, -100, 2])
    grads, sizes = [], []
    for wanted in (True, False):
        x = X.clone().requires_grad_()
        with Sizes() as seen:
            weight = matrix.clone().requires_grad_(wanted)
            f.linear_cross_entropy(x, weight, label).sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
        sizes.append(seen.largest)
    assert torch.equal(*grads)
    assert sizes == [36, 24]


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest second result of an operator of ours."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "linear_cross_entropy_grad" in str(func):
            self.largest = max(x.numel() for x in out)
        return out
