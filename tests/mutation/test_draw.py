"""Drawn faults: what each operator changes, and that the same ones are drawn each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ROOT
from tests.mutation.draw import OPERATORS, candidates, draw, suites_of
from tests.mutation.fault import Fault

SAMPLES = {
    "wrong axis": [
        ("x = self.mesh.tp", "x = self.mesh.dp"),
        ('x = axis_of("ep")', 'x = axis_of("edp")'),
        ("y = x.sum(dim=-1)", "y = x.sum(dim=0)"),
        ("n = x.shape[0]", "n = x.shape[1]"),
    ],
    "dropped term": [
        ("x = a + b * c", "x = a"),
        ("x = a + b * c", "x = a + b"),
        ("x = (a + b) * c", "x = (a + b)"),
        ("ok = a and b", "ok = b"),
    ],
    "off by one": [
        ("ok = a < b", "ok = a <= b"),
        ("x = list(range(n))", "x = list(range(n - 1))"),
        ("x = a + 1", "x = a"),
    ],
    "stale state": [("self.x = y", "pass"), ("total[0] += y", "pass")],
    "swapped rank": [
        ("x = mesh.dp.rank * n", "x = (mesh.dp.size - 1 - mesh.dp.rank) * n"),
        ("ok = rank == 0", "ok = rank != 0"),
        ("send(x, axis.next_rank)", "send(x, axis.previous_rank)"),
    ],
    "missing restore": [("self.state.load(x)", "pass"), ("handle.wait()", "pass")],
    "flipped comparison": [("ok = a is not b", "ok = a is b"), ("ok = not a", "ok = a")],
    "changed constant": [
        ("x = 2", "x = 3"),
        ("x = 0.5", "x = 1.0"),
        ("x = f(True)", "x = f(False)"),
    ],
}


def write(root: Path, text: str) -> None:
    (root / "megalite").mkdir(exist_ok=True)
    (root / "megalite" / "module.py").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_changes_what_it_says(operator: str, tmp_path: Path) -> None:
    for before, after in SAMPLES[operator]:
        write(tmp_path, f"def f():\n    {before}\n")
        found = {fault.replacement for fault in candidates("megalite", operator, tmp_path)}
        assert f"    {after}" in found, before


def test_messages_types_and_checks_are_left_alone(tmp_path: Path) -> None:
    lines = ('raise ValueError(f"{1} {a + b}")', "assert a < b", "x: Literal[1] = y", 'x = f"{3}"')
    write(tmp_path, "\n".join(lines) + "\n")
    for operator in OPERATORS:
        assert candidates("megalite", operator, tmp_path) == []


def test_first_values_are_no_stale_state(tmp_path: Path) -> None:
    write(tmp_path, "class A:\n    def __init__(self):\n        self.x = 1\n")
    assert candidates("megalite", "stale state", tmp_path) == []


def test_lines_above_are_taken_until_the_place_is_the_only_one(tmp_path: Path) -> None:
    write(tmp_path, "def f():\n    x = 1\n\ndef g():\n    x = 1\n")
    found = candidates("megalite", "changed constant", tmp_path)
    assert {fault.line(tmp_path) for fault in found} == {1, 4}
    last = next(fault for fault in found if fault.line(tmp_path) == 4)
    assert last.planted(tmp_path) == "def f():\n    x = 1\n\ndef g():\n    x = 2\n"


def test_the_same_faults_are_drawn_again_and_gaps_are_filled(tmp_path: Path) -> None:
    text = "def f(a, b):\n    self.x = a + b * 2\n    y = a - 3\n    return a < b and y != b\n"
    write(tmp_path, text)
    drawn = draw([], [], tmp_path, count=6)
    assert draw([], [], tmp_path, count=6) == drawn
    assert len({fault.change for fault in drawn}) == 6

    # One was left out, and the line of others is another one now: only these are drawn anew.
    left_out, kept = drawn[0], drawn[1:]
    write(tmp_path, text.replace(kept[0].anchor, f"{kept[0].anchor}  # more"))
    again = draw(kept, [left_out], tmp_path, count=6)
    assert left_out.change not in {fault.change for fault in again}
    lost = [fault.name for fault in kept if fault.line(tmp_path) is None]
    assert lost
    for fault in kept:
        assert (fault in again) == (fault.name not in lost)


def test_tests_follow_the_tree() -> None:
    assert suites_of("megalite/layout/topology.py") == (
        "tests/layout/test_topology.py",
        "tests/layout",
        "tests/parity",
        "tests/train",
    )
    assert suites_of("kernels/plain/rope.py")[0] == "tests/kernels/plain"
    assert suites_of("kernels/triton/norm.py")[0] == "tests/kernels/triton"
    assert "tests" not in suites_of("megalite/errors.py")


def test_a_fault_knows_its_package() -> None:
    assert Fault("", "", "megalite/train/loop.py", "", "").package == "megalite/train"
    assert (ROOT / "megalite/train/loop.py").is_file()
