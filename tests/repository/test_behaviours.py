"""docs/behaviours.md names tests that exist, each behaviour once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests import ROOT


def behaviours() -> list[tuple[str, list[str]]]:
    """(behaviour, names of its tests) of every list item, whose small print has the names."""
    text = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8")
    items = re.findall(r"^\* (.*)\n((?:  .*\n)*)", text, flags=re.MULTILINE)
    return [(behaviour, re.findall(r"`([^`]+)`", tests)) for behaviour, tests in items]


def test_every_behaviour_names_tests_that_exist() -> None:
    found = behaviours()
    assert len(found) >= 200
    missing = []
    for behaviour, tests in found:
        if not tests:
            missing.append(f"{behaviour}: no test")
        for test in tests:
            path, _, function = test.partition("::")
            if not (ROOT / path).is_file():
                missing.append(f"{test}: no such file")
            elif function and function not in functions(ROOT / path):
                missing.append(f"{test}: no such function")
    assert not missing, "\n".join(missing)


def test_no_behaviour_is_listed_twice() -> None:
    names = [behaviour for behaviour, _ in behaviours()]
    assert len(names) == len(set(names))


def functions(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
