"""The record of one rank's steps on the pretended device, as plain values that JSON can hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Literal

Kind = Literal["kernel", "collective", "wait", "sync", "copy", "mark", "split", "phase"]


@dataclass(frozen=True)
class Event:
    """One thing that the host asked of the device, in the order of the host.

    kernel: a launch of the Triton kernel or torch operator `name`. collective: operation number
    `op` on communicator `comm`, with `detail` its types and bytes. wait: the compute stream waits
    for operation `op`. sync: the host waits for the device, by `name`. copy: between host and
    device, "blocking" or "async". mark: an event was recorded. split: the world was split into
    groups, in `name`. phase: a part of the run begins.
    site: the file and the function of the product that asked.
    """

    kind: Kind
    name: str
    site: str = ""
    op: int = -1
    comm: str = ""
    detail: str = ""


@dataclass
class Trace:
    """Everything that one rank recorded. `faults`: what may never happen, in words.

    products: matrix products as "operator: type, type -> type".
    """

    rank: int = 0
    events: list[Event] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    products: Counter[str] = field(default_factory=Counter)

    def phases(self) -> dict[str, Phase]:
        """The events of each phase, by its name, in order."""
        found: dict[str, Phase] = {}
        name = ""
        for event in self.events:
            if event.kind == "phase":
                name = event.name
            else:
                found.setdefault(name, Phase([])).events.append(event)
        return found


@dataclass
class Phase:
    """The events of a part of a step."""

    events: list[Event]

    def of(self, kind: Kind) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def sites(self, kind: Kind) -> Counter[str]:
        """How often the events of a kind came from each place, as "NAME at FILE FUNCTION"."""
        return Counter(f"{event.name} at {event.site}" for event in self.of(kind))

    def names(self, kind: Kind) -> Counter[str]:
        return Counter(event.name for event in self.of(kind))


def write(path: Path, traces: Iterable[Trace]) -> None:
    """Write traces as JSON, one a line."""
    with path.open("w", encoding="utf-8") as file:
        for trace in traces:
            events = [astuple(event) for event in trace.events]
            file.write(json.dumps(vars(trace) | {"events": events}) + "\n")


def read(path: Path) -> list[Trace]:
    """The traces of a file that `write` made."""
    traces = []
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        events = [Event(*event) for event in values["events"]]
        traces.append(Trace(values["rank"], events, values["faults"], Counter(values["products"])))
    return traces
