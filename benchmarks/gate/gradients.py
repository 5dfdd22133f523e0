"""The first part of gpu_gate: the gradients that CUDA computes in branches of their own.

A weight gradient is a product of 16-bit tensors that torch adds to float32 by one call, which no
CPU has. The embedding's gradient sorts its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gate.cases import Case, Shape, Shapes
from benchmarks.gate.check import run_checks
from benchmarks.gate.device import Gate, Inputs
from megalite.kernels import select
from tests.tolerances import SUMS_IN_FLOAT32


def no_work(i: Inputs) -> float:
    """Nothing here is timed."""
    return 0.0


def make_product(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    tokens, rows, columns = (shape[name] for name in ("T", "F", "D"))
    return {
        "ops": select("interpret" if gate.dry else "triton", gate.device, dtype),
        "dy": gate.draw(tokens, rows, dtype=dtype, seed=3 * seed),
        "x": gate.draw(tokens, columns, dtype=dtype, seed=3 * seed + 1),
        "buffer": gate.draw(rows, columns, seed=3 * seed + 2),
    }


def run_product(i: Inputs) -> Sequence[Tensor]:
    """Two microbatches, a third of the tokens and the rest, into a buffer that is not empty."""
    cut = i["x"].shape[0] // 3
    for part in (slice(cut), slice(cut, None)):
        i["ops"].accumulate_weight_grad_(i["buffer"], i["dy"][part], i["x"][part])
    return [i["buffer"]]


def want_product(i: Inputs) -> Sequence[Tensor]:
    return [i["buffer"].double() + i["dy"].double().t() @ i["x"].double()]


def make_rows(gate: Gate, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    """Half of the tokens are one row, some are of another shard."""
    tokens, vocab, columns = (shape[name] for name in ("T", "v", "D"))
    row = gate.integers(vocab + 4, tokens, seed=seed) - 2
    row[::2] = vocab - 1
    return {
        "ops": select("interpret" if gate.dry else "triton", gate.device, dtype),
        "dy": gate.draw(tokens, columns, dtype=dtype, seed=2 * seed),
        "row": row,
        "buffer": gate.draw(vocab, columns, seed=2 * seed + 1),
    }


def run_rows(i: Inputs) -> Sequence[Tensor]:
    i["ops"].embedding_grad_(i["buffer"], i["dy"], i["row"])
    return [i["buffer"]]


def want_rows(i: Inputs) -> Sequence[Tensor]:
    owned = (i["row"] >= 0) & (i["row"] < len(i["buffer"]))
    return [i["buffer"].double().index_add(0, i["row"][owned], i["dy"].double()[owned])]


PRODUCT = Shapes(
    checked=[{"T": 37, "F": 33, "D": 65}, {"T": 4096, "F": 1536, "D": 2048},
             {"T": 8192, "F": 4096, "D": 4096}],
    timed={},
    dry=[{"T": 7, "F": 5, "D": 3}],
)  # fmt: skip
ROWS = Shapes(
    checked=[{"T": 37, "v": 11, "D": 65}, {"T": 4096, "v": 32000, "D": 2048},
             {"T": 8192, "v": 64128, "D": 4096}],
    timed={},
    dry=[{"T": 29, "v": 5, "D": 3}],
)  # fmt: skip
CASES = [
    Case("weight_grad", "", make_product, run_product, want_product, no_work, PRODUCT,
         bound=SUMS_IN_FLOAT32),
    Case("embedding_grad", "", make_rows, run_rows, want_rows, no_work, ROWS,
         bound=SUMS_IN_FLOAT32),
]  # fmt: skip


def gradients(gate: Gate) -> None:
    """A row a case, shape and type; shapes from the small and odd one to that of an 8B model."""
    run_checks(
        gate,
        [
            (case, shape, dtype)
            for case in CASES
            for dtype in case.dtypes
            for shape in (case.shapes.dry if gate.dry else case.shapes.checked)
        ],
    )
