"""docs/settings.md is what config/schema.py says, and says something about every setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalite.checks import open_run
from megalite.config import RunConfig, Section
from megalite.config.text import to_toml
from tests import ROOT
from tests.repository.kit.settings import docs_of, is_list, reference, section_of, sections

DOCS = ROOT / "docs"


def test_the_page_is_made_from_the_config() -> None:
    page = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert page == reference(), "run: python -m tests.repository.kit > docs/settings.md"


def test_every_setting_has_a_row() -> None:
    page = reference()
    for name, section in sections(RunConfig, ""):
        assert f"## [{name}]" in page or not name
        for key, info in section.model_fields.items():
            is_table = section_of(info.annotation) and not is_list(info.annotation)
            assert is_table or f"| `{key}` |" in page


def test_no_cell_is_empty_and_defaults_are_toml() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 120
    for row in rows:
        _, default, values, text = (cell.strip() for cell in row.strip("| ").split(" | "))
        assert values, row
        assert text, row
        assert default in ("required", "left out") or re.fullmatch(r"`.+`", default), row


@pytest.mark.parametrize(("name", "section"), sections(RunConfig, ""))
def test_the_example_of_a_section_loads(
    name: str, section: type[Section], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, or over the settings of the quickstart; checked as a run is."""
    monkeypatch.chdir(ROOT)
    _, example = docs_of(section)
    assert f"[{name}]" in example or not name
    base, path = tmp_path / "base.toml", tmp_path / "example.toml"
    base.write_text(to_toml(open_run("configs/quickstart.toml").config))
    above = "" if "base = " in example else f'base = "{base}"\n'
    path.write_text(above + example.replace('"configs/', f'"{ROOT}/configs/'))
    assert str(path) in open_run(path).origins.values(), example
