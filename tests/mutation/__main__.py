"""`python -m tests.mutation`: plant the listed faults one at a time; which test sees each?

Prints a table, and at its end the share of faults that tests caught. A result counts for the commit
that it was found at; the next run goes on with what is missing. Exit code: 0 if at least 95 % are
caught and every fault is valid, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

from tests import ROOT
from tests.mutation.draw import draw
from tests.mutation.fault import Fault, listed, read, write_drawn
from tests.mutation.trial import CAUGHT, INVALID, Copy, Verdict

LEAST_SHARE = 0.95


def main() -> int:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.draw:
        write_drawn(draw(read("drawn"), read("left_out")))
        return 0
    faults = [fault for fault in listed() if fault.line() is not None]
    lost = [fault.name for fault in listed() if fault not in faults]
    for name in lost:
        print(f"{name}: its lines are gone; --draw draws another, or change by_hand.toml")

    commit = commit_of()
    known = results(options.results, None if options.keep else commit)
    wanted = select(faults, options.only, options.start, options.limit)
    missing = [fault for fault in wanted if fault.name not in known]
    for fault, verdict in tries(missing, options.jobs, options.bound):
        print(row(fault, verdict), flush=True)
        record = {"commit": commit, "fault": fault.name, "change": fault.change}
        options.results.parent.mkdir(parents=True, exist_ok=True)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | asdict(verdict)) + "\n")
        known[fault.name] = verdict

    print(f"\n{commit}\n\n{HEADINGS}")
    for fault in wanted:
        print(row(fault, known[fault.name]))
    outcomes = [known[fault.name].outcome for fault in wanted]
    share = outcomes.count(CAUGHT) / max(1, len(outcomes))
    print(f"\n{outcomes.count(CAUGHT)} of {len(outcomes)} caught, {share:.1%}")
    return 0 if share >= LEAST_SHARE and INVALID not in outcomes and not lost else 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    made.add_argument("--draw", action="store_true", help="draw faults where the list has gaps")
    made.add_argument("--only", action="append", metavar="NAME", help="a fault's name or a part")
    made.add_argument("--from", dest="start", type=int, default=0, metavar="N")
    made.add_argument("--limit", type=int, metavar="N")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="copies at once")
    made.add_argument("--bound", type=float, default=1800.0, metavar="S", help="of a fault's tests")
    made.add_argument("--results", type=Path, default=ROOT / "build" / "mutation.jsonl")
    made.add_argument("--keep", action="store_true", help="results of other commits count, too")
    return made


def commit_of() -> str:
    """The commit under test, marked where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def select(
    faults: Sequence[Fault], only: Sequence[str] | None, start: int, limit: int | None
) -> list[Fault]:
    named = [f for f in faults if only is None or any(part in f.name for part in only)]
    return named[start:][:limit]


def results(path: Path, commit: str | None) -> dict[str, Verdict]:
    """The last result of each fault that is still what it was; of one commit, or of all (None)."""
    changes = {fault.name: list(fault.change) for fault in listed()}
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        record = json.loads(line)
        name, change, at = (record.pop(key) for key in ("fault", "change", "commit"))
        if changes.get(name) == change and commit in (None, at):
            found[name] = Verdict(**record)
    return found


def tries(faults: Sequence[Fault], jobs: int, bound_s: float) -> Iterator[tuple[Fault, Verdict]]:
    """Each fault with its verdict, as they come."""
    if not faults:
        return
    with ExitStack() as stack:
        if jobs == 1:  # in the main thread, which a signal interrupts
            copy = stack.enter_context(Copy())
            yield from ((fault, copy.try_fault(fault, bound_s)) for fault in faults)
            return
        free: SimpleQueue[Copy] = SimpleQueue()
        for _ in range(jobs):
            free.put(stack.enter_context(Copy()))

        def attempt(fault: Fault) -> tuple[Fault, Verdict]:
            copy = free.get()
            try:
                return fault, copy.try_fault(fault, bound_s)
            finally:
                free.put(copy)

        yield from stack.enter_context(ThreadPoolExecutor(jobs)).map(attempt, faults)


HEADINGS = "| fault | operator | place | outcome | how | test | s |\n|---|---|---|---|---|---|---|"


def row(fault: Fault, verdict: Verdict) -> str:
    place = f"{fault.file}:{fault.line()}"
    cells = (fault.name, fault.operator, place, verdict.outcome, verdict.how, verdict.test)
    return f"| {' | '.join(cells)} | {verdict.seconds:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
