"""docs/behaviours.md names tests that exist, each behaviour once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests import ROOT


def rows() -> list[tuple[str, list[str]]]:
    """(behaviour, names of its tests) of every row of the table."""
    text = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8")
    cells = [line.strip("| \n").split(" | ") for line in text.splitlines() if line[:2] == "| "]
    return [(row[0], re.findall(r"`([^`]+)`", row[1])) for row in cells[2:]]


def test_every_behaviour_names_tests_that_exist() -> None:
    table = rows()
    assert len(table) >= 30
    missing = []
    for behaviour, tests in table:
        if not tests:
            missing.append(f"{behaviour}: no test")
        for test in tests:
            path, _, function = test.partition("::")
            if not (ROOT / path).is_file():
                missing.append(f"{test}: no such file")
            elif function and function not in functions(ROOT / path):
                missing.append(f"{test}: no such function")
    assert not missing, "\n".join(missing)


def test_no_behaviour_stands_twice() -> None:
    names = [behaviour for behaviour, _ in rows()]
    assert len(names) == len(set(names))


def functions(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
