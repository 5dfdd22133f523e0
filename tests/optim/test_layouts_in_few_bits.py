"""Every number format and every narrow option at other layouts, each within its stated bound."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.optim.kit.model_runs import Changes, outcome, serial
from tests.parity.case import Case
from tests.parity.run import compare
from tests.pool import RankPool
from tests.tolerances import BFLOAT16_UNIT, FLOAT32, LAYOUT_GRADIENTS, LAYOUT_LOSSES

LAYOUTS = [
    Case(tp=2, sp=True, dp=2, zero=1, kv_heads=2, m=1),
    Case(tp=2, pp=2, kv_heads=2, mask="ragged"),
]


@dataclass(frozen=True)
class Format:
    """Settings, and what another layout may change: first gradients and the losses, relative."""

    changes: Changes
    gradients: float
    losses: float


def of_dtype(dtype: str, *more: tuple[str, object]) -> Format:
    changes = (("train.dtype", dtype), *more)
    return Format(changes, LAYOUT_GRADIENTS[dtype], LAYOUT_LOSSES[dtype])


FORMATS = {
    "float32": of_dtype("float32"),
    "bfloat16": of_dtype("bfloat16"),
    "float16": of_dtype("float16", ("optimizer.loss_scale", 1024.0)),
    "bf16 moments": of_dtype("float32", ("optimizer.moment_dtype", "bfloat16")),
    # a rank's rounding is at most a unit of its part; the loss sees it through updates only
    "bf16 reduction": Format(
        (("train.dtype", "float32"), ("optimizer.grad_reduce_dtype", "bfloat16")),
        BFLOAT16_UNIT + FLOAT32,
        LAYOUT_LOSSES["float16"],
    ),
    "muon in bf16": of_dtype(
        "bfloat16", ("optimizer.name", "muon"), ("optimizer.muon_dtype", "bfloat16")
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_layout_is_within_the_bound_of_the_format(pool: RankPool, name: str, case: Case) -> None:
    """Replicas hold the same bits, too: the pieces are laid over each other."""
    wanted = FORMATS[name]
    errors = compare(outcome(pool, case, wanted.changes), serial(case, wanted.changes))
    assert errors["first"] <= wanted.gradients
    assert errors["loss"] <= wanted.losses


@pytest.mark.parametrize("name", FORMATS)
def test_one_process_is_within_the_bound_of_the_exact_numbers(name: str) -> None:
    """A first step's gradients beside float64's: a lost or doubled scale would show."""
    case, wanted = LAYOUTS[0], FORMATS[name]
    exact = (("optimizer.name", "muon"),) if "muon" in name else ()
    errors = compare(serial(case, wanted.changes), serial(case, exact))
    assert errors["first"] <= wanted.gradients
