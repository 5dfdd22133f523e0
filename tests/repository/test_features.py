"""docs/features.md names tests that exist, for every part."""

from __future__ import annotations

import re

from tests import ROOT

_PART = re.compile(r"^\*\*(?P<name>[^*]+)\*\* \((?P<tests>.*)\)$", re.MULTILINE)


def test_every_part_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    parts = {
        found["name"]: re.findall(r"`(tests/[^`]+)`", found["tests"])
        for found in _PART.finditer(text)
    }
    assert len(parts) == len(re.findall(r"^\*\*", text, re.MULTILINE)) >= 14
    for name, tests in parts.items():
        assert tests, f"{name} names no test"
        for test in tests:
            path = ROOT / test
            files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
            assert files, f"{name}: {test} has no tests"
