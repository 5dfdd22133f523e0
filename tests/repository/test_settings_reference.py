"""docs/settings.md is what config/schema.py says, and says something about every setting."""

from __future__ import annotations

from megalite.config import RunConfig
from tests import ROOT
from tests.repository.kit import comments_of, reference, section_of, sections

DOCS = ROOT / "docs"


def test_the_page_is_made_from_the_config() -> None:
    page = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert page == reference(), "run: python -m tests.repository.kit > docs/settings.md"


def test_every_setting_has_a_row() -> None:
    page = reference()
    for name, section in sections(RunConfig, ""):
        assert f"## [{name}]" in page or not name
        for key, info in section.model_fields.items():
            assert section_of(info.annotation) or f"| `{key}` |" in page
    assert comments_of(RunConfig)["name"].startswith("a folder name below")
