"""pydantic's findings about a config in our words: one line each, with value, origin and remedy."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from megalite.config_keys import toml_value

# pydantic's error type -> what the setting takes
_NEEDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda ctx: "needs an integer",
    "int_from_float": lambda ctx: "needs an integer",
    "float_type": lambda ctx: "needs a number",
    "finite_number": lambda ctx: "needs a finite number",
    "bool_type": lambda ctx: "needs true or false",
    "string_type": lambda ctx: "needs a text in quotes",
    "string_too_short": lambda ctx: "must not be empty",
    "string_pattern_mismatch": lambda ctx: (
        "may have letters, digits, '_', '-' and '.' only, and may not start with '.' or '-'"
    ),
    "list_type": lambda ctx: "needs a list, for example [1, 2]",
    "tuple_type": lambda ctx: "needs a list, for example [0.98, 0.02]",
    "too_long": lambda ctx: f"needs {ctx['max_length']} numbers",
    "literal_error": lambda ctx: f"needs {ctx['expected']}",
    "greater_than_equal": lambda ctx: f"needs to be at least {ctx['ge']:g}",
    "greater_than": lambda ctx: f"needs to be greater than {ctx['gt']:g}",
    "less_than_equal": lambda ctx: f"needs to be at most {ctx['le']}",
    "less_than": lambda ctx: f"needs to be less than {ctx['lt']:g}",
    "value_error": lambda ctx: str(ctx["error"]),
}


def explain(error: ValidationError, origins: Mapping[str, str], meant: set[str]) -> list[str]:
    """One line per finding; a missing key that a misspelt one was `meant` to be is left out."""
    lines = []
    for found in error.errors():
        location = found["loc"]
        name = ".".join(str(part) for part in location[:2])
        if found["type"] == "missing" and name in meant and len(location) <= 2:
            continue
        lines.append(_line(name, location[2:], found, origins))
    return lines


def _line(name: str, inside: tuple[int | str, ...], found: Any, origins: Mapping[str, str]) -> str:
    if found["type"] == "missing" and not inside:
        section, _, key = name.rpartition(".")
        return f"{name} is not set; put {key} = VALUE under [{section}] or give {name}=VALUE"
    where = f" ({origins[name]})" if name in origins else ""
    if found["type"] == "missing":
        return f"{name}={toml_value(found['input'])}{where} needs 2 numbers"
    spot = name + "".join(f"[{part}]" for part in inside)
    kind, value = found["type"], found["input"]
    # An unlisted type can only come from a new kind of field; its own message is then the best.
    needs = _NEEDS[kind](found.get("ctx", {})) if kind in _NEEDS else str(found["msg"]).lower()
    return f"{spot}={toml_value(value)}{where} {needs}{_remedy(kind, value)}"


def _remedy(kind: str, value: object) -> str:
    """For a number or switch in quotes: how to write it; empty otherwise."""
    if kind not in ("int_type", "float_type", "bool_type") or not isinstance(value, str):
        return ""
    try:
        bare = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return ""
    fits = {"int_type": (int,), "float_type": (int, float), "bool_type": (bool,)}[kind]
    if type(bare) not in fits:
        return ""
    return f"; write it without quotes: {value}"
