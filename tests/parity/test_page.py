"""docs/parity.md has the table of the cases as they are."""

from __future__ import annotations

import re

from tests import ROOT
from tests.parity.__main__ import page
from tests.parity.covering import pairwise_cases
from tests.tolerances import PARITY_FLOAT64


def test_the_page_has_every_case_within_the_bar() -> None:
    """Its figures differ in their last digits from one processor to another, its cases do not."""
    text = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    kinds = ("loss", "norm", "grad", "param", "exp_avg", "exp_avg_sq")
    made = page([(case, dict.fromkeys(kinds, 0.0)) for case in pairwise_cases()], 0.0)
    figure = re.compile(r"\d\.\de[+-]\d\d")
    assert figure.sub("E", text) == figure.sub("E", made)
    errors = [float(cell) for cell in re.findall(r"(?<=\| )\d\.\de[+-]\d\d", text)]
    assert len(errors) == 5 * len(pairwise_cases())
    assert 0 < max(errors) <= PARITY_FLOAT64
    assert f"{max(errors):.1e} relative" in text
