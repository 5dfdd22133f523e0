"""Traits that no family of the pairwise set has: each at layouts that cut all of its parts."""

from __future__ import annotations

import pytest

from tests.parity.case import TRAITS, Case
from tests.parity.test_parity import check
from tests.pool import RankPool

LAYOUTS = (
    Case(tp=2, sp=True, pp=2, recompute="selective", mask="documents", kv_heads=2, m=2),
    Case(tp=4, dp=2, zero=1, tied=True, chunk_tokens=7, overlap=False, m=1),
    Case(pp=2, vpp=2, schedule="interleaved", recompute="full", tied=True, kv_heads=2, m=2),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("traits", TRAITS)
def test_layout_equals_one_process(pool: RankPool, traits: str, layout: Case) -> None:
    check(pool, Case(**{**vars(layout), "family": traits}))
