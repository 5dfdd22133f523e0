"""A copy of the checkout, a fault in it, and what pytest says there.

The copy holds the files that git knows or would add; the tests import megalite from it through
PYTHONPATH. Nothing outside of a temporary folder is written.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from xml.etree import ElementTree

from tests import ROOT
from tests.mutation.fault import Fault

CAUGHT, SURVIVED, INVALID = "caught", "SURVIVED", "INVALID"

# Errors that say that the fault is no program, not that a test has seen it.
_NO_PROGRAM = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError",
               "UnboundLocalError", "AttributeError")  # fmt: skip
_IN_A_RANK = re.compile(rf"^(?:E +)?(?:\w+\.)*({'|'.join(_NO_PROGRAM)})\b", re.MULTILINE)
_NO_BOUND = "no bound"
_NO_TESTS = 5  # exit code of pytest where everything was ignored
_LATE = re.compile(r"no answer within|did not end within|TimeoutExpired|nothing came for")


@dataclass(frozen=True)
class Verdict:
    """The outcome of a fault. test: the one that failed; how: "assertion", "bound" or an error."""

    outcome: str
    test: str = ""
    how: str = ""
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Failure:
    """The first test that failed."""

    test: str
    how: str
    message: str
    at_collection: bool


class Copy:
    """A scratch copy of the checkout, which tests run in; a context."""

    def __init__(self, source: Path = ROOT) -> None:
        self._source = source
        self._folder = Path(tempfile.mkdtemp(prefix="mutation-"))
        self.root = self._folder / "tree"
        self._written = 0
        self._sound: dict[str, bool] = {}  # tests by whether they pass without a fault

    def __enter__(self) -> Copy:
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"],
            cwd=self._source,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (self._source / name).exists():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._source / name, self.root / name, follow_symlinks=False)

        # Some tests ask git for the files of the checkout.
        for command in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", *command], cwd=self.root, check=True)
        (self._folder / "path").mkdir()
        (self._folder / "path" / "megalite").symlink_to(self.root / "megalite")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_processes()
        shutil.rmtree(self._folder, ignore_errors=True)

    def try_fault(self, fault: Fault, bound_s: float) -> Verdict:
        """Plant a fault, run its tests until one fails, and take the fault out again.

        The test that failed then runs once more without the fault, and must pass.
        """
        began = time.monotonic()
        path = self.root / fault.file
        before = path.read_text(encoding="utf-8")
        self._write(path, fault.planted(self.root))
        try:
            failure = self._first_to_fail(fault.tests, bound_s)
        finally:
            self._write(path, before)
        seconds = time.monotonic() - began

        if failure is None:
            return Verdict(SURVIVED, seconds=seconds)
        found = (failure.test, failure.how, failure.message, seconds)
        if failure.how == _NO_BOUND:
            return Verdict(SURVIVED, *found)
        if failure.at_collection or failure.how in _NO_PROGRAM:
            return Verdict(INVALID, *found)
        if not self._passes_soundly(failure.test, bound_s):
            return Verdict(INVALID, failure.test, "fails without the fault", *found[2:])
        return Verdict(CAUGHT, *found)

    def _passes_soundly(self, test: str, bound_s: float) -> bool:
        if test not in self._sound:
            self._sound[test] = self._pytest([test], bound_s) is None
        return self._sound[test]

    def _write(self, path: Path, text: str) -> None:
        """Write with a time of its own, so that no compiled file of another text is taken."""
        path.write_text(text, encoding="utf-8")
        self._written += 1
        os.utime(path, (1e9 + self._written, 1e9 + self._written))

    def _first_to_fail(self, tests: Sequence[str], bound_s: float) -> Failure | None:
        """Run the tests in their order, each once: pytest alone would join what overlaps."""
        end = time.monotonic() + bound_s
        for number, test in enumerate(tests):
            done = [f"--ignore={earlier}" for earlier in tests[:number]]
            failure = self._pytest([*done, test], end - time.monotonic())
            if failure is not None:
                return failure
        return None

    def _pytest(self, arguments: Sequence[str], bound_s: float) -> Failure | None:
        """The first failure of a run; one without a test's name if it did not end in time."""
        report, temporary = self._folder / "report.xml", self._folder / "t"
        report.unlink(missing_ok=True)
        temporary.mkdir()
        # -P and no `python -m pytest` in the tree's root: kernels/ would be a package of its own.
        command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
                   "-o", "junit_family=xunit1", f"--junitxml={report}", *arguments]  # fmt: skip
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._folder / "path"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TMPDIR": str(temporary),
            "OMP_NUM_THREADS": "1",
        }
        with open(self._folder / "output.txt", "w+", encoding="utf-8") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(bound_s)
            except subprocess.TimeoutExpired:
                return Failure("", _NO_BOUND, "the tests went on beyond --bound", False)
            finally:
                self._end_processes()
                process.wait()
                shutil.rmtree(temporary, ignore_errors=True)
            if code in (0, _NO_TESTS):
                return None
            found = first_failure(report) if report.is_file() else None
            output.seek(0)
            return found or Failure("", f"pytest {code}", output.read()[-500:], True)

    def _end_processes(self) -> None:
        """End what a test left running: every process with this copy's PYTHONPATH."""
        mark = f"PYTHONPATH={self._folder / 'path'}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def first_failure(report: Path) -> Failure | None:
    """The first failed test of a JUnit file of pytest."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        for kind in ("failure", "error"):
            found = case.find(kind)
            if found is not None:
                message = found.get("message", "")
                at_collection = message.startswith("collection failure")
                if at_collection:
                    message = (found.text or "")[-300:]
                return Failure(name_of(case), how_of(message), message[:300], at_collection)
    return None


def name_of(case: ElementTree.Element) -> str:
    """A test as pytest takes it on its command line."""
    file, name = case.get("file", ""), case.get("name", "")
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).strip(".")
    return "::".join(part for part in (file, *classes.split("."), name) if part)


def how_of(message: str) -> str:
    """How a test failed, by its message: "assertion", "bound", or the error's name."""
    message = re.sub(r'^failed on (setup|teardown) with "', "", message)
    no_program = _IN_A_RANK.search(message)
    if no_program:
        return no_program[1]
    if _LATE.search(message):
        return "bound"
    name = re.match(r"(?:\w+\.)*(\w+)", message)
    first = name[1] if name else ""
    is_error = re.fullmatch(r"\w*(?:Error|Exception|Group|Exit|Interrupt|Warning)", first)
    return first if is_error and first != "AssertionError" else "assertion"
