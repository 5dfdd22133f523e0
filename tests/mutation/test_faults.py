"""The listed faults can be planted; and a trial of one in a small checkout of its own."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests import ROOT
from tests.mutation.draw import NUM_DRAWN, OPERATORS, compiles
from tests.mutation.fault import Fault, fault_of, listed, read
from tests.mutation.trial import Copy, first_failure, how_of

LISTED = listed()


def test_the_list_is_whole() -> None:
    names = Counter(fault.name for fault in [*LISTED, *read("left_out")])
    assert max(names.values()) == 1
    assert len({fault.change for fault in LISTED}) == len(LISTED)
    assert len(read("drawn")) == NUM_DRAWN >= 40
    assert {fault.operator for fault in read("drawn")} == set(OPERATORS)


@pytest.mark.parametrize("fault", LISTED, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    advice = "`python -m tests.mutation --draw` draws another; in by_hand.toml write the new lines"
    assert fault.line() is not None, f"the lines of {fault.file} are gone or twice: {advice}"
    assert compiles(fault)
    before = (ROOT / fault.file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(fault.planted())) != ast.dump(ast.parse(before))
    assert fault.tests
    for test in fault.tests:
        assert (ROOT / test).exists(), test


def test_what_is_left_out_has_a_reason() -> None:
    assert all(fault.reason for fault in read("left_out"))


def test_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout of one function: seen, not seen, no bound, and a test that fails anyway."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a quicker start
    files = {
        "megalite/__init__.py": "",
        "megalite/sums.py": "def double(x):\n    return 2 * x\n",
        "tests/test_sums.py": (
            "import time\nfrom megalite.sums import double\n\n\n"
            "def test_double():\n    time.sleep(max(0, -double(1)))\n    assert double(2) == 4\n"
        ),
        "tests/test_unsound.py": "def test_never():\n    assert False\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    with Copy(tmp_path) as copy:
        found = []
        for replacement, test, bound_s in (
            ("3 * x", "sums", 120),
            ("x + x", "sums", 120),
            ("-3600", "sums", 3),
            ("3", "unsound", 120),
        ):
            tests = (f"tests/test_{test}.py",)
            change = ("    return 2 * x", f"    return {replacement}")
            fault = Fault("", "", "megalite/sums.py", *change, tests)
            verdict = copy.try_fault(fault, bound_s)
            found.append((verdict.outcome, verdict.how))
            assert (copy.root / fault.file).read_text(encoding="utf-8") == files[fault.file]
    assert found == [
        ("caught", "assertion"),
        ("SURVIVED", ""),
        ("SURVIVED", "no bound"),
        ("INVALID", "fails without the fault"),
    ]
    assert not copy.root.exists()


def test_the_first_failure_of_a_report(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.a.test_b" file="tests/a/test_b.py" name="test_a"/>'
        '<testcase classname="tests.a.test_b.TestC" file="tests/a/test_b.py" name="test_d[x::y]">'
        '<failure message="assert 1 == 2&#10;more">...</failure></testcase>'
        "</testsuite></testsuites>"
    )
    found = first_failure(path)
    assert found is not None
    assert found.test == "tests/a/test_b.py::TestC::test_d[x::y]"
    assert (found.how, found.at_collection) == ("assertion", False)


@pytest.mark.parametrize(
    ("message", "how"),
    [
        ("assert 1 == 2", "assertion"),
        ("AssertionError: other bits", "assertion"),
        ("Failed: DID NOT RAISE ValueError", "assertion"),
        ("tests.pool.RankFailed: f failed in 1 of 2 ranks\nValueError: x", "assertion"),
        ("tests.pool.RankFailed: no answer within 60 s", "bound"),
        ("tests.pool.RankFailed: f failed in 1 of 2 ranks\nNameError: x", "NameError"),
        ("a.py:1: in <module>\n    import x\nE   ModuleNotFoundError: no x", "ModuleNotFoundError"),
        ("subprocess.TimeoutExpired: Command 'x' timed out after 5 seconds", "bound"),
        ("megalite.errors.ConfigError: no", "ConfigError"),
        ("failed on setup with \"KeyError: 'k'\"", "KeyError"),
    ],
)
def test_how_a_test_failed(message: str, how: str) -> None:
    assert how_of(message) == how


def test_a_text_in_the_list_keeps_its_spaces() -> None:
    table = {"name": "a", "operator": "", "file": "f", "anchor": "  x\n", "replacement": "\n"}
    assert fault_of(table).anchor == "  x"
    assert fault_of(table).replacement == ""
