"""The pages for those who come from another framework have the words that messages know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalite.config.frameworks import foreign_words
from tests import ROOT
from tests.repository.kit.foreign_words import PAGES, with_tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == with_tables(page)


def test_every_framework_has_its_table() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"<!-- words of ([\w -]+) -->", text)
    assert sorted(found) == sorted({word.framework for word in foreign_words()})
    assert (ROOT / "docs" / "from" / "megatron-lm.md") in PAGES
