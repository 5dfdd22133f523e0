"""The correctness part of gpu_gate: every kernel against float64, poisoned, twice.

A row a case, shape and type: the worst relative error (Frobenius) over its bound, whether a second
run gave the same bits, and what is wrong. The most used come first: bfloat16 at the middle shape,
then its other shapes, then other types; what the deadline leaves out is named in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.gate.cases import CASES as POINTWISE
from benchmarks.gate.cases import Case, Shape
from benchmarks.gate.device import Gate, Late, Row, copied, poisoned, same_bits
from tests.tolerances import KERNEL_BACKWARD, KERNEL_FORWARD

Check = tuple[Case, Shape, torch.dtype]


def all_cases() -> list[Case]:
    """Every case; attention first, for it takes longest to compile."""
    from benchmarks.gate.attention import CASES as ATTENTION
    from benchmarks.gate.cases_loss import CASES as LOSS
    from benchmarks.gate.cases_moe import CASES as EXPERTS

    return [*ATTENTION, *LOSS, *POINTWISE, *EXPERTS]


def first_checks(cases: Sequence[Case], dry: bool) -> Iterator[Check]:
    """What to check first. A dry run takes the dry shapes, each in one type of several."""
    for index, case in enumerate(cases):
        if not dry:
            yield case, case.shapes.checked[1], case.dtypes[0]
        for shape in case.shapes.dry if dry else ():
            yield case, shape, case.dtypes[index % len(case.dtypes)]


def other_checks(cases: Sequence[Case], dry: bool) -> Iterator[Check]:
    """What to check then, in order."""
    if dry:
        return
    for case in cases:
        yield from (
            (case, shape, case.dtypes[0])
            for shape in (case.shapes.checked[0], case.shapes.checked[2])
        )
    for case in cases:
        for dtype in case.dtypes[1:]:
            yield from ((case, shape, dtype) for shape in case.shapes.checked[:2])


def run(gate: Gate, share: tuple[int, int] = (0, 1)) -> None:
    """Check this process's share (index, count) of the cases.

    In between, kernels are compiled for the shapes that will be timed: here several processes do.
    """
    cases = all_cases()[share[0] :: share[1]]
    run_checks(gate, list(first_checks(cases, gate.dry)))
    for case in cases:
        if gate.left_s > 0 and not gate.dry and is_timed(case):
            with gate.guarded({"kernel": case.name, "shape": dict(case.shapes.timed)}):
                case.run(case.make(gate, case.shapes.timed, case.dtypes[0], 0))
    run_checks(gate, list(other_checks(cases, gate.dry)))


def is_timed(case: Case) -> bool:
    """Of attention not all are."""
    from benchmarks.gate.attention import TIMED

    return not case.name.startswith("attention") or case.name.removesuffix(" grad") in TIMED


def run_checks(gate: Gate, todo: Sequence[Check]) -> None:
    """A row each; at the deadline one that names what is left."""
    for done, (case, shape, dtype) in enumerate(todo):
        row: Row = {
            "kernel": case.name,
            "shape": dict(shape),
            "dtype": str(dtype).removeprefix("torch."),
        }
        try:
            gate.require(0.0, "correctness")
        except Late as late:
            left = [f"{c.name} {dict(s)} {d}" for c, s, d in todo[done:]]
            gate.emit({"skipped": left, "reason": str(late)})
            return
        with gate.guarded({**row, "correct": False}):
            gate.emit({**row, **check(gate, case, shape, dtype)})


def check(gate: Gate, case: Case, shape: Shape, dtype: torch.dtype) -> Row:
    """What a row says about one case at one shape in one type."""
    with poisoned():
        inputs = case.make(gate, shape, dtype, 1)
        ours = case.check or case.run
        got = [x.clone() for x in ours(copied(inputs))]
        again = ours(copied(inputs))
        gate.synchronize()
    faults = [
        f"output {n}: a second run gave other bits"
        for n, (a, b) in enumerate(zip(got, again, strict=True))
        if not same_bits(a, b)
    ]
    worst = 0.0
    for n, (a, b) in enumerate(zip(got, case.want(inputs), strict=True)):
        if b.dtype != torch.float64:
            faults += [] if a.dtype == b.dtype and same_bits(a, b) else [f"output {n}: other bits"]
            continue
        bound = case.bound or (KERNEL_BACKWARD if case.backward else KERNEL_FORWARD)[a.dtype]
        share = error(a, b) / bound
        worst = max(worst, share)
        if not share <= 1.0:
            faults.append(f"output {n}: {share:.3g} x the bound of {bound:g}")
    return {"correct": not faults, "error_over_bound": worst, "faults": faults}


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN where only one side has one or sizes differ."""
    if got.shape != want.shape:
        return float("nan")
    got = got.double()
    same = got == want  # infinities that agree
    difference = torch.where(same, 0.0, got - want)
    scale = float(torch.where(want.isfinite(), want, 0.0).norm()) or 1.0
    return float(difference.norm()) / scale
