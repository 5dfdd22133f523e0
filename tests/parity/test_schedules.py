"""Every pipeline schedule trains to the numbers of one process, with everything it meets."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megalite.schedules.catalogue import SCHEDULES
from tests.parity.case import Case
from tests.parity.run import assemble, compare, reference, train_rank
from tests.parity.test_parity import check
from tests.pool import RankPool

pytestmark = pytest.mark.long


def case_of(name: str, pp: int, m: int, index: int) -> Case:
    """A case of a schedule; other options take turns, so that each schedule meets several."""
    named = SCHEDULES.get(name)
    vpp = 1 if named is not None and named.chunks.allows(1) and name != "gpipe" else 2
    options: list[dict[str, Any]] = [
        {"tied": True, "recompute": "stage", "mask": "ragged"},
        {"tied": True, "chunk_tokens": 7, "vocab": 131},
        {"recompute": "full", "clip": None},
        {"tied": True, "recompute": "selective", "overlap": False},
    ]
    return Case(pp=pp, vpp=vpp, schedule=name, m=m, **options[index % len(options)])


NAMES = [*SCHEDULES, "family:f=1.5,lag=0.5,group=3"]
CASES = [
    *(case_of(name, 2, 5, index) for index, name in enumerate(NAMES)),
    *(case_of(name, 4, 9, index + 1) for index, name in enumerate(NAMES)),
    *(case_of(name, 2, 1, index) for index, name in enumerate(("zb-v", "zb-h2", "v-min"))),
    # with the other axes: sharded optimizer, tensor and sequence parallel
    Case(pp=2, vpp=2, schedule="zb-v", dp=2, zero=1, tp=2, sp=True, tied=True, m=4),
    Case(pp=2, vpp=2, schedule="interleaved-zb", dp=2, zero=1, tp=2, recompute="stage", m=3),
    Case(pp=2, schedule="zb-h1", dp=2, zero=1, tied=True, micro_batch=2, m=2),
    Case(pp=4, vpp=2, schedule="v-min", dp=2, zero=1, tied=True, recompute="stage", m=3),
    Case(pp=8, vpp=2, schedule="interleaved-zb", tied=True, mask="ragged", m=9),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_schedule_equals_one_process(pool: RankPool, case: Case) -> None:
    check(pool, case)


def full_cases() -> list[Case]:
    """Every name on 2, 4 and 8 ranks with 1, 2 and 4 chunks where it is defined."""
    cases: list[Case] = []
    for index, (name, named) in enumerate(SCHEDULES.items()):
        for pp in (2, 4, 8):
            numbers = (2 * pp, 2 * pp + 1) if name == "dualpipe-v" else (1, pp, 2 * pp + 1)
            for m, vpp in product(numbers, (v for v in (1, 2, 4) if named.chunks.allows(v))):
                case = case_of(name, pp, m, index + len(cases))
                cases.append(replace(case, vpp=vpp))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("case", full_cases(), ids=str)
def test_schedule_equals_one_process_at_every_size(pool: RankPool, case: Case) -> None:
    check(pool, case)


@pytest.mark.parametrize(("pp", "tied"), [(4, False), (4, True), (1, True)])
def test_split_and_fused_backwards_agree_bit_for_bit(pool: RankPool, pp: int, tied: bool) -> None:
    outcomes = []
    for name in ("1f1b", "1f1b-early", "zb-h1", "zb-h2", "eager-1f1b"):
        case = Case(pp=pp, schedule=name, tied=tied, m=6)
        outcomes.append(assemble(pool.run(train_rank, case.world_size, case, case.num_layers)))
    for other in outcomes[1:]:
        assert other.losses == outcomes[0].losses
        assert set(compare(other, outcomes[0]).values()) == {0.0}


def test_the_reference_is_one_process() -> None:
    """The cases above are compared with something that has no pipeline at all."""
    for case in CASES:
        assert case.reference().world_size == 1
        assert case.reference().schedule == "1f1b"
    assert reference(CASES[0].reference(), 5).losses
