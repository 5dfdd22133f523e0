"""The cases of experts: rows sorted by expert and back, and products of each expert's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gate.cases import Case, Shape, Shapes
from benchmarks.gate.device import Gate, Inputs
from megalite.kernels.plain import moe as reference_moe
from megalite.kernels.triton.grouped_gemm import (
    grouped_linear,
    grouped_linear_input_grad,
    grouped_weight_grad_,
)
from megalite.kernels.triton.moe_permute import expert_rows, permute, unpermute, unpermute_grad


def make_rows(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    """Experts at random, some copies dropped (-1)."""
    tokens, copies, columns = shape["T"], shape["K"], shape["D"]
    expert = gate.integers(shape["E"] + 1, tokens, copies, seed=seed) - 1
    x, dout = (gate.draw(tokens, columns, dtype=dtype, seed=3 * seed + i) for i in (0, 1))
    y = gate.draw(tokens * copies, columns, dtype=dtype, seed=3 * seed + 2)
    return {"expert": expert, "experts": shape["E"], "rows": expert_rows(expert, shape["E"]),
            "x": x, "dout": dout, "y": y, "weight": gate.draw(tokens, copies)}  # fmt: skip


def make_products(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    num_rows, experts = shape["T"] * shape["K"], shape["E"]
    expert = gate.integers(experts + 1, shape["T"], shape["K"], seed=seed) - 1
    x = gate.draw(num_rows, shape["D"], dtype=dtype, seed=seed)
    dy = gate.draw(num_rows, shape["F"], dtype=dtype, seed=seed + 1)
    weight = gate.draw(experts, shape["F"], shape["D"], dtype=dtype, seed=seed + 2)
    buffer = gate.draw(experts, shape["F"], shape["D"], seed=seed + 3)
    offset = expert_rows(expert, experts).offset_E1
    return {"x": x, "dy": dy, "weight": weight, "buffer": buffer, "offset": offset}


def run_experts(i: Inputs) -> Sequence[Tensor]:
    return list(expert_rows(i["expert"], i["experts"]))


def want_experts(i: Inputs) -> Sequence[Tensor]:
    return list(reference_moe.expert_rows(i["expert"], i["experts"]))


def want_unpermute(i: Inputs) -> Sequence[Tensor]:
    return [reference_moe.unpermute(i["y"].double(), i["rows"], i["weight"].double())]


def run_unpermute_grad(i: Inputs) -> Sequence[Tensor]:
    return list(unpermute_grad(i["dout"], i["y"], i["rows"], i["weight"]))


def want_unpermute_grad(i: Inputs) -> Sequence[Tensor]:
    dout, y, weight = (i[name].double() for name in ("dout", "y", "weight"))
    return list(reference_moe.unpermute_grad(dout, y, i["rows"], weight))


def run_linear(i: Inputs) -> Sequence[Tensor]:
    return [grouped_linear(i["x"], i["weight"], i["offset"])]


def want_linear(i: Inputs) -> Sequence[Tensor]:
    return [reference_moe.grouped_linear(i["x"].double(), i["weight"].double(), i["offset"])]


def run_linear_grad(i: Inputs) -> Sequence[Tensor]:
    dx = grouped_linear_input_grad(i["dy"], i["weight"], i["offset"])
    grouped_weight_grad_(i["buffer"], i["dy"], i["x"], i["offset"])
    return [dx, i["buffer"]]


def want_linear_grad(i: Inputs) -> Sequence[Tensor]:
    x, dy, weight = (i[name].double() for name in ("x", "dy", "weight"))
    buffer = i["buffer"].double()
    reference_moe.grouped_weight_grad_(buffer, dy, x, i["offset"])
    return [reference_moe.grouped_linear_input_grad(dy, weight, i["offset"]), buffer]


def moved_bytes(i: Inputs) -> float:
    """Each token's row and each of its copies once."""
    return float((i["x"].numel() + i["y"].numel()) * i["x"].element_size())


def grad_bytes(i: Inputs) -> float:
    """Rows read and written, and the tokens' gradients."""
    return moved_bytes(i) + float(i["y"].numel() * i["y"].element_size())


def product_flops(i: Inputs) -> float:
    x: Tensor = i["x"]
    weight: Tensor = i["weight"]
    _, out, columns = weight.shape
    return 2.0 * len(x) * out * columns


ROWS = Shapes(
    checked=[
        {"T": 37, "K": 2, "E": 5, "D": 40, "F": 24},
        {"T": 512, "K": 8, "E": 16, "D": 512, "F": 256},
        {"T": 2048, "K": 8, "E": 128, "D": 2048, "F": 768},
    ],
    timed={"T": 8192, "K": 8, "E": 128, "D": 2048, "F": 768},
    dry=[{"T": 5, "K": 2, "E": 3, "D": 16, "F": 24}],
)
CASES = [
    Case("expert_rows", "", make_rows, run_experts, want_experts,
         lambda i: 3.0 * i["expert"].numel() * 4, ROWS, dtypes=(torch.bfloat16,)),
    Case("permute", "elementwise", make_rows, lambda i: [permute(i["x"], i["rows"])],
         lambda i: [reference_moe.permute(i["x"], i["rows"])], moved_bytes, ROWS),
    Case("unpermute", "elementwise", make_rows,
         lambda i: [unpermute(i["y"], i["rows"], i["weight"])], want_unpermute, moved_bytes,
         ROWS),
    Case("unpermute_grad", "elementwise", make_rows, run_unpermute_grad, want_unpermute_grad,
         grad_bytes, ROWS, backward=True),
    Case("grouped_linear", "grouped product", make_products, run_linear, want_linear,
         product_flops, ROWS),
    Case("grouped_linear_grad", "grouped product", make_products, run_linear_grad,
         want_linear_grad, lambda i: 2 * product_flops(i), ROWS, backward=True),
]  # fmt: skip
