"""Counted things in texts. Imports nothing, so that every floor can use it."""

from __future__ import annotations


def number_of(value: float, noun: str, spec: str = "") -> str:
    """A number with its noun in the singular or plural: "1 rank", "2 batches", "3 entries".

    spec: the format of the number, such as ",".
    """
    return f"{value:{spec}} {noun if value == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"
