"""The planted faults: lines of a file and what takes their place, kept in TOML beside this file.

`by_hand.toml` holds faults that were met or thought of, `drawn.toml` those of draw.py, and
`left_out.toml` drawn ones that change nothing, or cannot run, each with its reason.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import ROOT

FOLDER = Path(__file__).parent
HEAD = "# Made by `python -m tests.mutation --draw`, which keeps what is here and fills gaps.\n"


@dataclass(frozen=True)
class Fault:
    """A fault: in `file`, the lines `anchor` become the lines `replacement`.

    tests: what pytest runs, in order, until one fails. reason: of one that is left out.
    """

    name: str
    operator: str
    file: str
    anchor: str
    replacement: str
    tests: tuple[str, ...] = ()
    reason: str = ""

    @property
    def change(self) -> tuple[str, str, str]:
        """What makes two faults the same."""
        return self.file, self.anchor, self.replacement

    @property
    def package(self) -> str:
        return str(Path(self.file).parent)

    def line(self, root: Path = ROOT) -> int | None:
        """The number of the anchor's first line; None unless it is there just once."""
        path = root / self.file
        source = "\n" + path.read_text(encoding="utf-8") if path.is_file() else ""
        wanted = f"\n{self.anchor}\n"
        first = source.find(wanted)
        if first < 0 or source.find(wanted, first + 1) >= 0:
            return None
        return source.count("\n", 0, first) + 1

    def planted(self, root: Path = ROOT) -> str:
        """The file's text with the fault in it."""
        text = "\n" + (root / self.file).read_text(encoding="utf-8")
        return text.replace(f"\n{self.anchor}\n", f"\n{self.replacement}\n", 1)[1:]


def read(name: str) -> list[Fault]:
    """The faults of `by_hand`, `drawn` or `left_out`."""
    tables = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return [fault_of(table) for table in tables.get("fault", [])]


def fault_of(table: dict[str, Any]) -> Fault:
    """A table of the file as a fault; a multi-line text ends with a newline that is not its own."""
    texts = {key: str(table[key]).removesuffix("\n") for key in ("anchor", "replacement")}
    return Fault(**{**table, **texts, "tests": tuple(table.get("tests", ()))})


def listed() -> list[Fault]:
    """All faults that are planted, those by hand first."""
    return [*read("by_hand"), *read("drawn")]


def write_drawn(faults: Sequence[Fault]) -> None:
    (FOLDER / "drawn.toml").write_text(HEAD + "".join(map(toml, faults)), encoding="utf-8")


def toml(fault: Fault) -> str:
    tests = "".join(f'  "{test}",\n' for test in fault.tests)
    return (
        f'\n[[fault]]\nname = "{fault.name}"\noperator = "{fault.operator}"\n'
        f'file = "{fault.file}"\n'
        f"anchor = '''\n{fault.anchor}\n'''\nreplacement = '''\n{fault.replacement}\n'''\n"
        f"tests = [\n{tests}]\n"
    )
