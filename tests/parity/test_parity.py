"""Every layout gives the numbers of one process: loss, norm, each gradient, weight and moment."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice

import pytest

from tests.parity.case import Case
from tests.parity.covering import all_cases, legal_pairs, pairs_of, pairwise_cases
from tests.parity.run import Outcome, assemble, compare, reference, train_rank
from tests.pool import RankPool
from tests.tolerances import PARITY_FLOAT64

pytestmark = pytest.mark.long

PAIRWISE = pairwise_cases()


def outcome(pool: RankPool, case: Case) -> Outcome:
    return assemble(pool.run(train_rank, case.world_size, case, case.num_layers))


def check(pool: RankPool, case: Case) -> None:
    errors = compare(outcome(pool, case), reference(case.reference(), case.num_layers))
    assert set(errors) == {"loss", "norm", "grad", "param", "exp_avg", "exp_avg_sq"}
    bad = {kind: error for kind, error in errors.items() if not error <= PARITY_FLOAT64}
    assert not bad, f"{case}: {bad}"


@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_layout_equals_one_process(pool: RankPool, case: Case) -> None:
    check(pool, case)


def test_pairwise_set_covers_every_legal_pair() -> None:
    covered = set().union(*(pairs_of(asdict(case)) for case in PAIRWISE))
    assert legal_pairs() <= covered
    met = set().union(*(pairs_of(asdict(case)) for case in islice(all_cases(), 0, None, 37)))
    assert met <= legal_pairs()


@pytest.mark.slow
def test_full_product(pool: RankPool) -> None:
    for case in all_cases():
        check(pool, case)
