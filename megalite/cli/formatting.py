"""Values as text, in the same form for every verb: numbers for people, JSON for programs."""

from __future__ import annotations

import json
from typing import Any

import typer


def short_count(value: int | None) -> str:
    """A count in thousands, millions or billions: "1.25M"; below a thousand in full; or "n/a"."""
    if value is None:
        return "n/a"
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return str(value)


def short_duration(seconds: float) -> str:
    """Seconds, or the unit in which they are a small number: "3.2 days", "45 ms"."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def print_json(values: dict[str, Any]) -> None:
    """Print what `--json` asks for; numbers that are not finite become "nan", "inf" or "-inf"."""
    from megalite.record.records import plain

    typer.echo(json.dumps(plain(values), indent=2, allow_nan=False))
