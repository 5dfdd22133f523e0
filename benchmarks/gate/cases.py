"""The operations that gpu_gate checks and times: norms, activations, rotation, dropout, casts.

A case makes inputs, runs our kernels on them, and says in float64 what they should give. `want`
holds float64 tensors, compared within the bounds of the result's type, and tensors of any other
type, compared bit for bit. Loss and optimizer are in cases_loss, attention in attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gate.device import Gate, Inputs
from megalite.kernels import dropout_mask, rope_tables
from megalite.kernels.triton.cast import scale_cast
from megalite.kernels.triton.dropout import dropout
from megalite.kernels.triton.gelu import gelu, gelu_grad
from megalite.kernels.triton.norm import add_column_sums_, norm, norm_grad
from megalite.kernels.triton.rope import rotate
from megalite.kernels.triton.swiglu import swiglu, swiglu_grad

Shape = Mapping[str, int]
Make = Callable[[Gate, Shape, torch.dtype, int], Inputs]
EPS = 1e-5
KEY, P = (0x12345678, 0x9ABCDEF0), 0.1


@dataclass(frozen=True)
class Shapes:
    """The input shapes of a case: three to check at, small and odd first, one to time, dry ones."""

    checked: Sequence[Shape]
    timed: Shape
    dry: Sequence[Shape]


@dataclass(frozen=True)
class Case:
    """One direction of one operation. `work`: bytes moved at least, or FLOPs, of some inputs."""

    name: str
    kind: str  # which mark of benchmarks.gate.table it has to meet
    make: Make
    run: Callable[[Inputs], Sequence[Tensor]]  # may overwrite its inputs
    want: Callable[[Inputs], Sequence[Tensor]]
    work: Callable[[Inputs], float]
    shapes: Shapes
    backward: bool = False
    bound: float | None = None  # in place of that of a result's type
    check: Callable[[Inputs], Sequence[Tensor]] | None = None  # in place of `run`, not timed
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32)


def leaf(x: Tensor) -> Tensor:
    """A float64 leaf of the same values."""
    return x.detach().double().requires_grad_()


def grads(
    outputs: Sequence[Tensor], douts: Sequence[Tensor], leaves: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of float64 leaves, given those of the outputs."""
    return list(torch.autograd.grad(outputs, leaves, [d.double() for d in douts]))


# --- norms ---------------------------------------------------------------------------------------


def make_norm(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    rows = (shape["T"], shape["D"])
    x, residual, dy, ds = (gate.draw(*rows, dtype=dtype, seed=4 * seed + i) for i in range(4))
    weight, bias = (gate.draw(shape["D"], dtype=dtype, seed=i) for i in (5, 6))
    return {"x": x, "residual": residual, "dy": dy, "ds": ds, "weight": weight, "bias": bias}


def make_norm_backward(center: bool) -> Make:
    def make(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
        i = make_norm(gate, shape, dtype, seed)
        i["s"] = i.pop("x") + i.pop("residual")
        s = i["s"].float()
        mean = s.mean(1, keepdim=True) if center else torch.zeros_like(s[:, :1])
        i["mean"] = mean
        i["rstd"] = ((s - mean).square().mean(1, keepdim=True) + EPS).rsqrt()
        return i

    return make


def normed(s: Tensor, center: bool) -> Tensor:
    n = s - s.mean(1, keepdim=True) if center else s
    return n * (n.square().mean(1, keepdim=True) + EPS).rsqrt()


def run_norm(center: bool) -> Callable[[Inputs], Sequence[Tensor]]:
    def run(i: Inputs) -> Sequence[Tensor]:
        bias = i["bias"] if center else None
        y, s, mean, rstd = norm(i["x"], i["weight"], bias, EPS, i["residual"])
        return [y, s, rstd, *([mean] if mean is not None else [])]

    return run


def want_norm(center: bool) -> Callable[[Inputs], Sequence[Tensor]]:
    def want(i: Inputs) -> Sequence[Tensor]:
        rounded = (i["x"].float() + i["residual"].float()).to(i["x"].dtype)
        s = rounded.double()
        n = s - s.mean(1, keepdim=True) if center else s
        rstd = (n.square().mean(1, keepdim=True) + EPS).rsqrt()
        y = n * rstd * i["weight"].double()
        return [y + i["bias"].double() if center else y, rounded, rstd, *_mean(s, center)]

    return want


def _mean(s: Tensor, center: bool) -> list[Tensor]:
    return [s.mean(1, keepdim=True)] if center else []


def run_norm_grad(center: bool) -> Callable[[Inputs], Sequence[Tensor]]:
    def run(i: Inputs) -> Sequence[Tensor]:
        mean = i["mean"] if center else None
        dx, *partial = norm_grad(i["dy"], i["s"], i["weight"], mean, i["rstd"], i["ds"])
        found = [dx]
        for rows in (x for x in partial if x is not None):
            found.append(rows.new_zeros(rows.shape[1]))
            add_column_sums_(found[-1], rows)
        return found

    return run


def want_norm_grad(center: bool) -> Callable[[Inputs], Sequence[Tensor]]:
    def want(i: Inputs) -> Sequence[Tensor]:
        s, weight, bias = leaf(i["s"]), leaf(i["weight"]), leaf(i["bias"])
        y = normed(s, center) * weight + (bias if center else 0.0)
        ds, *rest = grads([y], [i["dy"]], [s, weight, bias] if center else [s, weight])
        return [ds + i["ds"].double(), *rest]

    return want


def norm_bytes(i: Inputs) -> float:
    """Two tensors of [T, D] read and two written; or three and one."""
    dy: Tensor = i["dy"]
    return 4.0 * dy.numel() * dy.element_size()


# --- activations ---------------------------------------------------------------------------------


def make_swiglu(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    tokens, ffn = shape["T"], shape["f"]
    h = gate.draw(tokens, 2 * ffn, dtype=dtype, seed=2 * seed).mul_(2)
    return {"h": h, "da": gate.draw(tokens, ffn, dtype=dtype, seed=2 * seed + 1)}


def swiglu64(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, 1)
    return F.silu(gate) * up


def want_swiglu_grad(i: Inputs) -> Sequence[Tensor]:
    h = leaf(i["h"])
    return grads([swiglu64(h)], [i["da"]], [h])


def run_swiglu_grad(i: Inputs) -> Sequence[Tensor]:
    swiglu_grad(i["da"], i["h"])
    return [i["h"]]


def make_gelu(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    tokens, ffn = shape["T"], shape["f"]
    h, da = (gate.draw(tokens, ffn, dtype=dtype, seed=2 * seed + k) for k in (0, 1))
    return {"h": h, "da": da, "bias": gate.draw(ffn, dtype=dtype, seed=9)}


def run_gelu(i: Inputs) -> Sequence[Tensor]:
    return [gelu(i["h"], i["bias"])]


def run_gelu_grad(i: Inputs) -> Sequence[Tensor]:
    dh, _, dbias = gelu_grad(i["da"], i["h"], False, i["bias"])
    assert dbias is not None
    return [dh, dbias]


def gelu64(h: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(h + bias, approximate="tanh")


def want_gelu_grad(i: Inputs) -> Sequence[Tensor]:
    h, bias = leaf(i["h"]), leaf(i["bias"])
    return grads([gelu64(h, bias)], [i["da"]], [h, bias])


def times_bytes(name: str, factor: float) -> Callable[[Inputs], float]:
    """So many times the bytes of one input."""
    return lambda i: factor * i[name].numel() * i[name].element_size()


# --- rotation, dropout, casts --------------------------------------------------------------------


def make_rope(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    tokens, groups, members, head = (shape[name] for name in ("T", "K", "G", "H"))
    length = min(tokens, shape.get("s", tokens))
    cos, sin = rope_tables(length, head, 5e5, torch.float32, gate.device)
    return {"x": gate.draw(tokens, groups, members, head, dtype=dtype, seed=seed), "cos": cos,
            "sin": sin}  # fmt: skip


def run_rope(i: Inputs) -> Sequence[Tensor]:
    return rotate(i["x"], i["cos"], i["sin"], copy_values=True)


def want_rope(i: Inputs) -> Sequence[Tensor]:
    x = i["x"].double()
    turns = len(x) // len(i["cos"])
    cos, sin = (i[name].double().repeat(turns, 1)[:, None, None, :] for name in ("cos", "sin"))
    first, second = x[:, :, :-1].chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return [turned[:, :, :-1], turned[:, :, -1:], x[:, :, -1:]]


def make_rows(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    return {"x": gate.draw(shape["T"], shape["D"], dtype=dtype, seed=seed)}


def want_dropout(i: Inputs) -> Sequence[Tensor]:
    rows, columns = (torch.arange(n, device=i["x"].device) for n in i["x"].shape)
    keep = dropout_mask(KEY, P, rows[:, None] + 7, columns)
    return [i["x"].double() * keep / (1 - P)]


def make_cast(low: torch.dtype) -> Make:
    def make(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
        x = gate.draw(shape["n"], dtype=dtype, seed=seed)
        scale = torch.full((1,), 3.0, device=gate.device)
        return {"x": x, "scale": scale, "low": low}

    return make


def run_cast(i: Inputs) -> Sequence[Tensor]:
    return [scale_cast(i["x"], i["scale"], i["low"])]


def want_cast(i: Inputs) -> Sequence[Tensor]:
    top = torch.finfo(i["low"]).max
    return [(i["x"].float() * i["scale"]).clamp(-top, top).to(i["low"])]


def cast_bytes(i: Inputs) -> float:
    return float(i["x"].numel() * (i["x"].element_size() + i["low"].itemsize))


def _rows(*pairs: tuple[int, int], names: str = "TD") -> list[Shape]:
    return [dict(zip(names, pair, strict=True)) for pair in pairs]


NORM = Shapes(
    checked=_rows((37, 1000), (513, 4096), (1025, 16384)),
    timed={"T": 8192, "D": 4096},
    dry=_rows((3, 37), (5, 64)),
)
WIDE = Shapes(
    checked=_rows((37, 1001), (513, 1408), (1024, 14336), names="Tf"),
    timed={"T": 8192, "f": 14336},
    dry=_rows((2, 37), (3, 64), names="Tf"),
)
ROPE = Shapes(
    checked=[
        {"T": 36, "K": 2, "G": 3, "H": 64, "s": 12},
        {"T": 512, "K": 8, "G": 6, "H": 128},
        {"T": 2048, "K": 1, "G": 9, "H": 80, "s": 1024},
    ],
    timed={"T": 8192, "K": 8, "G": 6, "H": 128},
    dry=[{"T": 4, "K": 2, "G": 3, "H": 16, "s": 2}],
)
FLAT = Shapes(
    checked=[{"n": 1003}, {"n": 1 << 20}, {"n": (1 << 24) + 16}],
    timed={"n": 1 << 28},
    dry=[{"n": 1003}],
)

CASES = [
    Case("rms_norm", "elementwise", make_norm, run_norm(False), want_norm(False), norm_bytes,
         NORM),
    Case("rms_norm_grad", "norm backward", make_norm_backward(False), run_norm_grad(False),
         want_norm_grad(False), norm_bytes, NORM, backward=True),
    Case("layer_norm", "elementwise", make_norm, run_norm(True), want_norm(True), norm_bytes,
         NORM),
    Case("layer_norm_grad", "norm backward", make_norm_backward(True), run_norm_grad(True),
         want_norm_grad(True), norm_bytes, NORM, backward=True),
    Case("swiglu", "elementwise", make_swiglu, lambda i: [swiglu(i["h"])],
         lambda i: [swiglu64(i["h"].double())], times_bytes("h", 1.5), WIDE),
    Case("swiglu_grad", "elementwise", make_swiglu, run_swiglu_grad, want_swiglu_grad,
         times_bytes("h", 2.5), WIDE, backward=True),
    Case("gelu", "elementwise", make_gelu, run_gelu,
         lambda i: [gelu64(i["h"].double(), i["bias"].double())], times_bytes("h", 2), WIDE),
    Case("gelu_grad", "elementwise", make_gelu, run_gelu_grad, want_gelu_grad,
         times_bytes("h", 3), WIDE, backward=True),
    Case("rope", "elementwise", make_rope, run_rope, want_rope,
         times_bytes("x", 2), ROPE),
    Case("dropout", "elementwise", make_rows, lambda i: [dropout(i["x"], KEY, P, 7)[0]],
         want_dropout, times_bytes("x", 2), NORM),
    Case("cast_bf16", "elementwise", make_cast(torch.bfloat16), run_cast, want_cast, cast_bytes,
         FLAT, dtypes=(torch.float32,)),
    Case("cast_e4m3", "elementwise", make_cast(torch.float8_e4m3fn), run_cast, want_cast,
         cast_bytes, FLAT, dtypes=(torch.float32, torch.bfloat16)),
]  # fmt: skip
