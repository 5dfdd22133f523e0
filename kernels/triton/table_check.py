"""The check of a table of tiles and block sizes. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TILES, _GROUPED = "queries keys warps stages", "rows columns inner warps stages"
# the keys that each kernel reads of an entry's "use"
NEEDS = {
    "attention_forward": _TILES,
    "attention_dq": _TILES,
    "attention_dkdv": _TILES,
    "attention_delta": "elements warps",
    "attention_splits": "block warps",
    "norm_forward": "elements warps",
    "norm_backward": "elements warps programs_per_sm one_pass",
    "norm_weight_grad": "rows columns warps",
    "column_sum": "rows columns warps",
    "embedding_grad": "rows columns warps",
    "swiglu": "block warps",
    "swiglu_grad": "block warps",
    "gelu": "block warps",
    "gelu_grad": "rows columns programs_per_sm warps",
    "rope": "pairs warps",
    "dropout": "block warps",
    "cross_entropy_stats": "block stages warps",
    "cross_entropy_combine": "tokens warps",
    "cross_entropy_grad": "block warps",
    "adamw": "block warps",
    "sum_squares": "block programs_per_sm warps",
    "sum_partials": "block warps",
    "cast": "block warps",
    "permute": "block warps",
    "unpermute": "block warps",
    "unpermute_grad": "block warps",
    "grouped_rows": _GROUPED,
    "grouped_weight_grad": _GROUPED,
}
_ATTENTION: dict[str, type] = {
    "float32": bool,
    "descriptors": bool,
    "dropout": bool,
    "head_dim_up_to": int,
}
_COLUMNS: dict[str, type] = {"columns_up_to": int}
_GROUPS: dict[str, type] = {"float32": bool}
_CONDITIONS: dict[str, dict[str, type]] = {
    **dict.fromkeys(("attention_forward", "attention_dq", "attention_dkdv"), _ATTENTION),
    **dict.fromkeys(("norm_forward", "norm_backward", "unpermute_grad"), _COLUMNS),
    **dict.fromkeys(("grouped_rows", "grouped_weight_grad"), _GROUPS),
}
_COUNTS = ("stages", "programs_per_sm")  # any number from 1; other sizes are powers of two
_OPTIONAL = {"two_loops_since": str}
_MOST_WARPS = 32


def table_problems(table: Any) -> Iterator[str]:
    """A line for each fault: its place, what was found, what was expected."""
    kernels = table.get("kernels") if isinstance(table, dict) else None
    if not isinstance(kernels, dict) or not isinstance(table.get("arch"), str):
        yield 'expected {"arch": "sm_...", "kernels": {...}}'
        return
    for kernel in NEEDS.keys() - kernels.keys():
        yield f"no entries for {kernel}"
    for kernel, entries in kernels.items():
        if kernel not in NEEDS:
            yield f"{kernel} is no kernel"
        elif not isinstance(entries, list) or not all(map(_is_entry, entries)) or not entries:
            yield f'{kernel}: expected a list of {{"when": {{...}}, "use": {{...}}}}'
        else:
            yield from _kernel_problems(kernel, entries)


def _is_entry(entry: Any) -> bool:
    """True if an entry has the tables "when" and "use"."""
    return isinstance(entry, dict) and all(
        isinstance(entry.get(part), dict) for part in ("when", "use")
    )


def _kernel_problems(kernel: str, entries: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each fault of a kernel's entries."""
    if entries[-1]["when"]:
        yield f"{kernel}: the last entry has conditions, expected none"
    for number, entry in enumerate(entries):
        where = f"{kernel}, entry {number}"
        conditions = _CONDITIONS.get(kernel, {})
        for name, value in entry["when"].items():
            if type(value) is not conditions.get(name):
                known = ", ".join(conditions) or "none"
                yield f"{where}: condition {name}={value!r}; known: {known}"
        needed = NEEDS[kernel].split()
        for name in needed:
            if name not in entry["use"]:
                yield f"{where}: no {name}"
        for name, value in entry["use"].items():
            if name not in (*needed, *_OPTIONAL):
                yield f"{where}: {name} is not used; known: {', '.join(needed)}"
            elif expected := _expected(name, value):
                yield f"{where}: {name}={value!r}, expected {expected}"


def _expected(name: str, value: Any) -> str | None:
    """The values that a name takes, if this is none of them; otherwise None."""
    whole = type(value) is int and value >= 1
    if name == "one_pass":
        sound, expected = isinstance(value, bool), "true or false"
    elif name in _OPTIONAL:
        sound = isinstance(value, str) and all(part.isdigit() for part in value.split("."))
        expected = "a version"
    elif name in _COUNTS:
        sound, expected = whole, "a whole number from 1"
    else:
        sound, expected = whole and value & (value - 1) == 0, "a power of two"
        if name == "warps":
            sound, expected = sound and value <= _MOST_WARPS, f"a power of two to {_MOST_WARPS}"
    return None if sound else expected
