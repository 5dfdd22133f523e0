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


def number(value: int, one: str, many: str = "") -> str:
    """A number with its noun; many: one with an s by default."""
    return f"{value} {one if value == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """Seconds, or the unit in which it is a small number."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
