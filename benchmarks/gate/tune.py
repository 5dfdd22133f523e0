"""The tuning part of gpu_gate: sweeps tiles and block sizes, and makes a table to commit.

Each entry of kernels/configs/sm90.json is timed at a shape that chooses it, then its neighbours.
A candidate must give the shipped one's results (attention within the bound of its type; other
kernels bit for bit unless they sum in another order) and be faster by more than the noise. The
table keeps what it does not better. Nothing of this happens in training.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gate.cases import Case, Shape
from benchmarks.gate.check import all_cases, error
from benchmarks.gate.device import Gate, Inputs, Late, Row, copied, describe
from megalite.kernels.triton import (
    adamw,
    attention,
    attention_backward,
    attention_tiles,
    cast,
    cross_entropy,
    dropout,
    gelu,
    grouped_gemm,
    moe_permute,
    norm,
    rope,
    swiglu,
    tables,
)
from tests.tolerances import KERNEL_BACKWARD

LAUNCHERS = (
    adamw,
    attention,
    attention_backward,
    attention_tiles,
    cast,
    cross_entropy,
    dropout,
    gelu,
    grouped_gemm,
    moe_permute,
    norm,
    rope,
    swiglu,
)
BETTER = 1.02  # how much faster a candidate must be
Use = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """An entry of the table, a case that runs it, and what to try in place of its values."""

    kernel: str
    entry: int
    case: str
    shape: Mapping[str, int]  # changes to the case's timed shape
    candidates: tuple[Use, ...]


def _grid(**values: tuple[Any, ...]) -> tuple[Use, ...]:
    """All combinations."""
    found: list[Use] = [{}]
    for name, options in values.items():
        found = [{**use, name: value} for use in found for value in options]
    return tuple(found)


_BLOCKS = _grid(block=(512, 1024, 2048, 4096), warps=(4, 8))
_FORWARD = tuple(
    {"queries": q, "keys": k, "warps": w, "stages": s}
    for q, k, w, s in (
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3),
        (64, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3), (128, 32, 4, 4),
    )
)  # fmt: skip
_DKDV = tuple(
    {"queries": q, "keys": k, "warps": w, "stages": s, "two_loops_since": loops}
    for q, k, w, s in (
        (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 2),
        (128, 64, 8, 2), (32, 64, 4, 3), (128, 128, 8, 1),
    )
    for loops in ("0", "99")
)  # fmt: skip
_ROWS = _grid(warps=(4, 8, 16, 32), programs_per_sm=(1, 2, 4))


def sweeps() -> list[Sweep]:
    """All of them, those that matter most first."""
    found = []
    for entry, head_dim in ((1, 128), (2, 96), (3, 256)):
        name = f"attention {head_dim}"
        found += [
            Sweep("attention_forward", entry, name, {}, _FORWARD),
            Sweep("attention_dq", entry, f"{name} grad", {}, _FORWARD),
            Sweep("attention_dkdv", entry, f"{name} grad", {}, _DKDV),
        ]
    blocks = ("swiglu", "swiglu_grad", "gelu", "dropout", "adamw", "cross_entropy_grad")
    found += [Sweep(name, 0, name, {}, _BLOCKS) for name in blocks]
    found += [
        Sweep("cast", 0, "cast_bf16", {}, _BLOCKS),
        Sweep("cross_entropy_stats", 0, "cross_entropy", {},
              _grid(block=(2048, 4096, 8192), warps=(4, 8, 16), stages=(1, 3))),
        Sweep("sum_squares", 0, "sum_squares", {},
              _grid(block=(2048, 4096, 8192), warps=(4, 8), programs_per_sm=(2, 4, 6, 8))),
        Sweep("gelu_grad", 0, "gelu_grad", {},
              _grid(rows=(2, 4, 8), columns=(256, 512), warps=(4, 8), programs_per_sm=(4, 8))),
        Sweep("rope", 0, "rope", {}, _grid(pairs=(512, 1024, 2048, 4096), warps=(2, 4, 8))),
        Sweep("attention_delta", 0, "attention 128 grad", {},
              _grid(elements=(2048, 4096, 8192), warps=(4, 8))),
    ]  # fmt: skip
    products = tuple(
        {"rows": m, "columns": n, "inner": k, "warps": w, "stages": s}
        for m, n, k, w, s in (
            (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 4, 4),
            (64, 256, 64, 4, 3), (64, 128, 64, 4, 4),
        )
    )  # fmt: skip
    found += [
        Sweep("grouped_rows", 1, "grouped_linear", {}, products),
        Sweep("grouped_weight_grad", 1, "grouped_linear_grad", {}, products),
        Sweep("permute", 0, "permute", {}, _BLOCKS),
        Sweep("unpermute", 0, "unpermute", {}, _BLOCKS),
        Sweep("unpermute_grad", 1, "unpermute_grad", {}, _BLOCKS),
    ]
    for entry, columns in enumerate((2048, 4096, 8192, 16384)):
        shape = {"T": (1 << 25) // columns, "D": columns}
        found.append(Sweep("norm_forward", entry, "rms_norm", shape, _grid(warps=(4, 8, 16, 32))))
        found.append(Sweep("norm_backward", entry, "rms_norm_grad", shape, _ROWS))
    return found


@contextmanager
def using(kernel: str, changes: Use) -> Iterator[None]:
    """Inside, the launchers of this process get a kernel's values with changes."""

    def choose(name: str, **shape: int | bool) -> Mapping[str, Any]:
        use = tables.choose(name, **shape)
        return tables.prepared({**use, **changes}) if name == kernel else use

    with ExitStack() as stack:
        for module in LAUNCHERS:
            stack.enter_context(patch.object(module, "choose", choose))
        yield


def tune(gate: Gate) -> None:
    """A row a candidate, and at last the table with the winners."""
    cases = {case.name: case for case in all_cases()}
    table = copy.deepcopy(json.loads(tables.TABLE.read_text(encoding="utf-8")))
    todo = sweeps()
    if gate.dry:
        todo = [s for s in todo if s.case in ("attention 96", "swiglu", "rms_norm_grad")][:3]
    for index, sweep in enumerate(todo):
        try:
            best = sweep_one(gate, sweep, cases[sweep.case])
        except Late as late:
            left = [f"{s.kernel} {s.case}" for s in todo[index:]]
            gate.emit({"skipped": left, "reason": str(late)})
            break
        if best is not None:
            entry = table["kernels"][sweep.kernel][sweep.entry]
            entry["use"] |= best[0]
            entry["chosen"] = best[1]
    gate.emit({"table": table})


def sweep_one(gate: Gate, sweep: Sweep, case: Case) -> tuple[Use, str] | None:
    """The fastest candidate and why it was chosen; None where the shipped one stays."""
    shape: Shape = case.shapes.dry[0] if gate.dry else {**case.shapes.timed, **sweep.shape}
    sets = gate.input_sets(lambda seed: case.make(gate, shape, case.dtypes[0], seed))
    fresh = copied(sets[0])  # timing overwrites what works in place
    expected = [x.clone() for x in case.run(copied(fresh))]
    shipped_s = gate.time_s(case.run, sets)
    best: tuple[float, Use] = (shipped_s, {})
    candidates = sweep.candidates[:2] if gate.dry else sweep.candidates
    for use in candidates:
        gate.require(0.0, f"{sweep.kernel} {use}")
        row: Row = {"kernel": sweep.kernel, "entry": sweep.entry, "case": case.name, "use": use}
        try:
            with using(sweep.kernel, use):
                worst = agreement(case, fresh, expected)
                seconds = gate.time_s(case.run, sets)
        except Exception as fault:
            gate.emit({**row, "failed": describe(fault)})
            gate.require_alive()
            continue
        times = shipped_s / seconds
        gate.emit({**row, "ms": seconds * 1e3, "times_faster": times, "error_over_bound": worst})
        if worst <= 1.0 and seconds < best[0]:
            best = (seconds, use)
    gate.free()
    if shipped_s < BETTER * best[0]:
        return None
    name = torch.cuda.get_device_name(gate.device) if gate.device.type == "cuda" else "no GPU"
    times = shipped_s / best[0]
    return best[1], f"measured on {name}: {times:.2f} times as fast as the values before"


def agreement(case: Case, inputs: Inputs, expected: list[torch.Tensor]) -> float:
    """Worst difference from the shipped results, over the bound of their type."""
    got = case.run(copied(inputs))
    return max(
        error(a, b.double()) / KERNEL_BACKWARD.get(a.dtype, 1e-9)
        for a, b in zip(got, expected, strict=True)
    )
