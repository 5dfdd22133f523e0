"""Values as people read them, for every verb."""

from __future__ import annotations


def count(value: int | None) -> str:
    """A count in thousands, millions or billions; small ones as they are."""
    if value is None:
        return "n/a"
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return str(value)
