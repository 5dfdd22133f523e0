"""The records of all ranks of a world side by side: agreement, completion, overlap.

A communicator runs its operations one after another, in the order in which a rank launched them,
and each needs all its members. A wait holds back what the compute stream does afterwards, and with
it every later launch, whose input that stream makes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.gpu.kit.trace import Event, Trace

Operation = tuple[str, int]  # communicator, and number among its operations


def members(comm: str) -> list[int]:
    """The ranks of a communicator, which its name begins with."""
    return [int(rank) for rank in comm.partition(" ")[0].split(",")]


def split_faults(traces: Sequence[Trace]) -> list[str]:
    """Where ranks split the world otherwise than others, or into groups that overlap."""
    faults = []
    rounds = [[event.name for event in trace.events if event.kind == "split"] for trace in traces]
    if any(other != rounds[0] for other in rounds):
        faults.append(f"ranks split the world in other rounds: {rounds}")
    for made in rounds[0]:
        ranks = Counter(rank for group in _groups(made) for rank in group)
        if any(count > 1 for count in ranks.values()):
            faults.append(f"a split has a rank twice: {made}")
    return faults


def _groups(text: str) -> list[list[int]]:
    return [[int(rank) for rank in group.split(",")] for group in text.strip("[]").split("], [")]


def order_faults(traces: Sequence[Trace]) -> list[str]:
    """Communicators whose members launch other operations, or the same in another order."""
    launched: dict[str, dict[int, list[tuple[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for event in trace.events:
            if event.kind == "collective":
                launched[event.comm][trace.rank].append((event.name, event.detail))

    faults = []
    for comm, by_rank in launched.items():
        if sorted(by_rank) != members(comm):
            faults.append(f"{comm}: only ranks {sorted(by_rank)} use it")
            continue
        first, *others = (by_rank[rank] for rank in members(comm))
        for rank, other in zip(members(comm)[1:], others, strict=True):
            if list(map(_partner, other)) != first:
                faults.append(f"{comm}: rank {rank} launches other operations than the first")
    return faults


def _partner(operation: tuple[str, str]) -> tuple[str, str]:
    """The operation of the first member that belongs to one of another member."""
    name, detail = operation
    return {"send": "recv", "recv": "send"}.get(name, name), detail


def unfinished(traces: Sequence[Trace], *, serial: bool) -> list[str]:
    """Ranks that never come to their end, each with the operation at which it stands.

    serial: everything that a rank launches is in one queue of the hardware, so that it begins only
    when all that was launched before has ended; else each communicator has a stream of its own.
    """
    programs = [_program(trace) for trace in traces]
    positions = [0] * len(programs)
    launches: Counter[Operation] = Counter()
    done: set[Operation] = set()
    next_of: Counter[str] = Counter()  # by communicator: its first operation that has not ended
    newest: list[Operation | None] = [None] * len(programs)

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while positions[rank] < len(program):
                is_launch, operation = program[positions[rank]]
                blocked = newest[rank] if serial and is_launch else None
                blocked = blocked if is_launch else operation
                if blocked is not None and blocked not in done:
                    break
                if is_launch:
                    launches[operation] += 1
                    newest[rank] = operation
                positions[rank] += 1
                moved = True
        for comm in {comm for comm, _ in launches}:
            while launches[comm, next_of[comm]] == len(members(comm)):
                done.add((comm, next_of[comm]))
                next_of[comm] += 1
                moved = True
    return [
        f"rank {trace.rank}: {program[position]}"
        for trace, program, position in zip(traces, programs, positions, strict=True)
        if position < len(program)
    ]


def _program(trace: Trace) -> list[tuple[bool, Operation]]:
    """A rank's launches (True) and waits (False) in order."""
    numbers: Counter[str] = Counter()
    operations: dict[int, Operation] = {}
    program: list[tuple[bool, Operation]] = []
    for event in trace.events:
        if event.kind == "collective":
            operations[event.op] = (event.comm, numbers[event.comm])
            numbers[event.comm] += 1
            program.append((True, operations[event.op]))
        elif event.kind == "wait":
            program.append((False, operations[event.op]))
    return program


def overlap_faults(trace: Trace) -> list[str]:
    """Operations in flight that the host, or the compute stream, waits for before their own wait.

    Both happen where a later operation on the same communicator is waited for: it cannot end before
    the earlier one. The host then stands still at its next synchronisation.
    """
    faults = []
    open_: dict[int, Event] = {}  # launched and not waited for, in order
    forced: dict[int, str] = {}  # of those: what was waited for behind them
    for event in trace.events:
        if event.kind == "collective":
            open_[event.op] = event
        elif event.kind == "wait":
            waited = open_.pop(event.op, None)
            forced.pop(event.op, None)
            if waited is None:
                continue
            for op, other in open_.items():
                if other.comm == event.comm and op < event.op and op not in forced:
                    forced[op] = f"{waited.name} of {waited.site}"
        elif event.kind == "sync":
            for op, behind in forced.items():
                faults.append(
                    f"{event.name} at {event.site} makes the host wait for the {open_[op].name} of "
                    f"{open_[op].site}, which {behind} stands behind on {open_[op].comm}"
                )
            forced = {}
    return faults


def hidden_kernels(trace: Trace, site: str) -> list[int]:
    """For each operation from a place: the number of kernels between its launch and its wait.

    site: the file, and maybe the function, as events have them.
    """
    numbers: dict[int, int] = {}
    counts: dict[int, int] = {}
    kernels = 0
    for event in trace.events:
        if event.kind == "kernel":
            kernels += 1
        elif event.kind == "collective" and event.site.startswith(site):
            numbers[event.op] = kernels
        elif event.kind == "wait" and event.op in numbers:
            counts[event.op] = kernels - numbers[event.op]
    return [counts[op] for op in numbers]
