"""Words of other frameworks, and the setting that stands for each here, if there is one.

The table is frameworks.toml beside this file, the only one. It is read when a message needs it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# Words differ in these ends only: tensor_parallel_size here, tensor_parallel_degree there.
_ENDS = ("_size", "_degree")

# Keys that switch a section on and off, unless its row names others.
_SWITCHES = ("enable", "enabled")


@dataclass(frozen=True)
class ForeignWord:
    """A setting of another framework, and what to write for it.

    setting: the name that means the same here, None if there is none. note: what differs, or what
    megalite does not have and has instead. off: the values that switch off what megalite does not
    have, or has switched off by default. switches: of a word that is a whole section, or of one in
    it, the keys that take these values; a section without them is off where all in it is.
    """

    framework: str
    word: str
    setting: str | None
    note: str
    off: tuple[Any, ...] = ()
    switches: tuple[str, ...] = ()

    def advice(self, value: Any = True) -> str:
        """The end of a message about the word with a value: "that is train.steps here"."""
        if self.is_off(value):
            return "remove it; it is off here as well"
        if self.setting is None:
            return f"megalite has no {self.note}"
        return f"that is {self.setting} here{f' ({self.note})' if self.note else ''}"

    def is_off(self, value: Any) -> bool:
        """True if a value, as a file or a command line has it, asks for nothing that is missing."""
        if isinstance(value, dict) and self.setting is None:
            if switches := [value[key] for key in self.switches if key in value]:
                return all(map(self.is_off, switches))
            return all(map(self.is_off, value.values()))
        return str(value).lower() in [str(each).lower() for each in self.off]


@cache
def foreign_words() -> tuple[ForeignWord, ...]:
    """The whole table, by framework."""
    path = Path(__file__).with_name("frameworks.toml")
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    return tuple(
        _word(framework, word, row)
        for framework, rows in tree.items()
        for word, row in rows.items()
    )


def find_foreign(name: str) -> ForeignWord | None:
    """The row of a dotted name, written with hyphens or underscores; None if it is no known word.

    A word with its section comes first, then the word in any section, then both as one word
    (eval.iters is eval_iters), then one without its "_size". All in a section of something that
    megalite does not have is of that, too.
    """
    name = name.strip().lower().replace("-", "_")
    section, _, leaf = name.rpartition(".")
    by_word = {row.word: row for row in reversed(foreign_words())}
    stems = {_stem(word): row for word, row in by_word.items()}
    wholes = [by_word[part] for part in section.split(".") if part in by_word]
    missing = next((row for row in wholes if row.setting is None), None)
    words = (by_word.get(name), missing, by_word.get(leaf), by_word.get(name.replace(".", "_")))
    return next(filter(None, words), stems.get(_stem(leaf)))


def _word(framework: str, word: str, row: Any) -> ForeignWord:
    off: tuple[Any, ...] = ()
    if isinstance(row, dict):
        off, switches = tuple(row["off"]), tuple(row.get("switches", _SWITCHES))
        if "missing" in row:
            return ForeignWord(framework, word, None, row["missing"], off, switches)
        row = row["setting"]
    setting, _, note = row.partition(":")
    return ForeignWord(framework, word, setting, note.strip(), off)


def _stem(word: str) -> str:
    for end in _ENDS:
        word = word.removesuffix(end)
    return word
