"""The site of docs/ builds without a warning, has every page in its menu, and can be searched."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests import ROOT


def pages_of(nav: Any) -> list[str]:
    """The pages of a menu, in its order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def test_the_menu_has_every_page_once() -> None:
    settings = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    found = pages_of(settings["project"]["nav"])
    docs = ROOT / "docs"
    assert sorted(found) == sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))


def test_the_site_builds_and_can_be_searched(tmp_path: Path) -> None:
    """`--strict` fails for a link to a page or a heading that is not there."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (tmp_path / "docs").rglob("*.md"):
        built = tmp_path / "site" / page.relative_to(tmp_path / "docs").with_suffix(".html")
        assert "</html>" in built.read_text(encoding="utf-8"), built
    index = json.loads((tmp_path / "site" / "search.json").read_text(encoding="utf-8"))
    assert "checkpoint.keep_every" in json.dumps(index)
