"""pydantic's errors about a config as messages: one line each, with value, origin and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from typing import Any

from pydantic import ValidationError

from megalite.config.names import keys, sections, toml_value

# Other common names of number formats.
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
_DTYPE_ALIASES |= {"float": "float32", "fp64": "float64", "double": "float64"}

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_UNITS = {"": "", "k": "e3", "m": "e6", "b": "e9", "g": "e9", "t": "e12"}
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_NUMBER = re.compile(r"(?P<number>[+-]?\d+(\.\d+)?([eE][+-]?\d+)?)\s*(?P<unit>[a-zA-Z]*)")

# setting -> what stands for a value that it does not take, such as 0 or "all" elsewhere
_INSTEAD = {"checkpoint.keep": "all stay by checkpoint.keep_every=1"}

_BOUNDS = ("greater_than", "greater_than_equal")

# pydantic's error type -> the values that the setting takes, in words
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
    "literal_error": lambda ctx: f"needs {ctx['expected']}",
    "greater_than_equal": lambda ctx: f"needs to be at least {ctx['ge']:g}",
    "greater_than": lambda ctx: f"needs to be greater than {ctx['gt']:g}",
    "less_than_equal": lambda ctx: f"needs to be at most {ctx['le']}",
    "less_than": lambda ctx: f"needs to be less than {ctx['lt']:g}",
    "value_error": lambda ctx: str(ctx["error"]),
}


def explain(error: ValidationError, origins: Mapping[str, str], meant: set[str]) -> list[str]:
    """One line per error; `origins` are by dotted key, as in `LoadedConfig`.

    A missing key is left out if it is in `meant`: an unknown key was probably meant to be it, and
    has a line already. A section that is missing altogether gets one line for all its keys.
    """
    lines: list[str] = []
    absent: dict[str, list[str]] = {}
    for found in error.errors():
        name, inside = split_location(found["loc"])
        if found["type"] == "missing" and not inside:
            section, _, key = name.rpartition(".")
            if name not in meant:
                absent.setdefault(section, []).append(key)
            continue
        lines.append(_line(name, inside, found, origins))
    for section, missing in absent.items():
        lines += _missing(section, missing, origins)
    return lines


def split_location(location: tuple[int | str, ...]) -> tuple[str, tuple[int | str, ...]]:
    """An error's location as a dotted key and the path inside the key's value."""
    length = 2
    while ".".join(str(part) for part in location[:length]) in sections():
        length += 1
    return ".".join(str(part) for part in location[:length]), location[length:]


def _missing(section: str, missing: list[str], origins: Mapping[str, str]) -> list[str]:
    if not section:
        return [f"{key} is not set; add {key} = VALUE" for key in missing]
    untouched = not any(name.startswith(f"{section}.") for name in origins)
    if untouched and len(missing) > 1:
        return [f"section [{section}] is missing; it needs {', '.join(missing)}"]
    return [
        f"{section}.{key} is not set; put {key} = VALUE under [{section}] or give "
        f"{section}.{key}=VALUE"
        for key in missing
    ]


def _line(name: str, inside: tuple[int | str, ...], found: Any, origins: Mapping[str, str]) -> str:
    where = f" ({origins[name]})" if name in origins else ""
    kind, value = found["type"], found["input"]
    if kind in ("missing", "extra_forbidden"):  # found inside a table: the table is named
        table = _path_text(name, inside[:-1])
        if kind == "missing":
            return f"{table}={toml_value(value)}{where} has no {inside[-1]}; add it"
        return f"{table}{where} has no setting {inside[-1]!r}; remove it"
    # An unlisted type can only come from a new kind of field; its own message is then the best.
    needs = _NEEDS[kind](found.get("ctx", {})) if kind in _NEEDS else str(found["msg"]).lower()
    # Elsewhere 0 or -1 turns off what is off by "none" here.
    key = None if inside else keys().get(name)  # None for a key of a hardware file, too
    off = ', or "none"' if key is not None and key.optional and kind in _BOUNDS else ""
    remedy = _remedy(found) or (f"; {_INSTEAD[name]}" if name in _INSTEAD else "")
    return f"{_path_text(name, inside)}={toml_value(value)}{where} {needs}{off}{remedy}"


def _path_text(name: str, inside: tuple[int | str, ...]) -> str:
    parts = [part for part in inside if part != "[key]"]  # pydantic's mark of a table's own key
    return name + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def _remedy(found: Any) -> str:
    """A suggestion: the nearest choice, or the value in the form to write; else empty."""
    value, kind = found["input"], found["type"]
    if kind == "list_type" and isinstance(value, dict):
        return f"; write [[{split_location(found['loc'])[0]}]] above each entry"
    if kind == "literal_error" and isinstance(value, str):
        near = _nearest_choice(value, re.findall(r"'([^']*)'", found["ctx"]["expected"]))
        return f"; did you mean {near}?" if near else ""
    if kind == "bool_type":
        word = str(value).lower()
        meant = "true" if word in _TRUE else "false" if word in _FALSE else ""
    elif kind in ("int_type", "int_from_float", "float_type"):
        is_time = str(found["loc"][-1]).endswith("_s")
        meant = _as_number(value, whole=kind != "float_type", is_time=is_time)
    else:
        return ""
    return f"; write {'it without quotes: ' if meant == value else ''}{meant}" if meant else ""


def _nearest_choice(value: str, choices: list[str]) -> str | None:
    wanted = value.lower().replace("-", "_")
    wanted = _DTYPE_ALIASES.get(wanted, wanted)
    scored = [(SequenceMatcher(None, wanted, choice).ratio(), choice) for choice in choices]
    score, best = max(scored, default=(0.0, ""))
    return best if score > 0.5 else None


def _as_number(value: Any, whole: bool, is_time: bool) -> str:
    """The TOML number that a text like "3", "1,000" or "10B" means; a float without its point.

    A time is in seconds: "30m" is 1800.
    """
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    match = _NUMBER.fullmatch(value.replace(",", "")) if isinstance(value, str) else None
    number, unit = (match["number"], match["unit"].lower()) if match else ("", "no number")
    if unit not in (_SECONDS if is_time else _UNITS):
        return ""
    written = f"{float(number) * _SECONDS[unit]:.12g}" if is_time else number + _UNITS[unit]
    return written if not whole or float(written).is_integer() else ""
