"""docs/reading.md: its files exist, come after what they need, and fit into a weekend."""

from __future__ import annotations

import re

import pytest

from tests import ROOT

TEXT = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
ROAD = re.findall(r"^\d+\. `([^`]+)`", TEXT, re.MULTILINE)
MOST_LINES = 10_000


def test_the_road_is_short_enough() -> None:
    assert len(ROAD) == len(set(ROAD)) > 50
    lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in ROAD)
    assert lines < MOST_LINES


def test_the_numbers_count() -> None:
    numbers = re.findall(r"^(\d+)\. `", TEXT, re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(1, len(ROAD) + 1))


@pytest.mark.parametrize("page", ["docs/reading.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.[a-z]+)`", text))
    assert named
    for path in named:
        assert (ROOT / path).is_file() or (ROOT / "megalite" / path).is_file(), path


def test_a_file_is_read_after_what_it_imports() -> None:
    """Within the road; importing a file that the road leaves out is no hindrance."""
    place = {path: number for number, path in enumerate(ROAD)}
    early = []
    for path, number in place.items():
        source = (ROOT / path).read_text(encoding="utf-8")
        for module in re.findall(r"^from (megalite\.[\w.]+) import", source, re.MULTILINE):
            needed = f"{module.replace('.', '/')}.py"
            if place.get(needed, -1) > number:
                early.append(f"{path} needs {needed}")
    assert not early, early
