"""Tiles, block sizes, warps and stages of the kernels: a committed table, never tuned at run time.

`configs/sm90.json` holds for each kernel a list of entries. The first one whose conditions ("when")
all hold for a shape gives what to "use"; "chosen" says why these, "static" which cases of the table
of machine code show them. A condition `NAME_up_to` bounds a size, any other must be equal. The last
entry of a kernel has no conditions: it is the rule for every shape that no other one names, and the
most frugal. The table was chosen for sm_90 and serves every architecture.

Other block sizes sum in another order and so give other bits: ranks share one table, and a run
records its hash (`table_hash`). Knows neither torch nor triton.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megalite.kernels.errors import BackendError
from megalite.kernels.triton.table_check import table_problems

_NAME, _REMEDY = "the kernels' table", "restore the file that megalite came with"
TABLE = Path(__file__).resolve().parents[1] / "configs" / "sm90.json"


@lru_cache
def _table() -> dict[str, Any]:
    try:
        table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BackendError(f"{_NAME} {TABLE} cannot be read: {error}; {_REMEDY}") from error
    problems = list(table_problems(table))
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise BackendError(f"{_NAME} {TABLE}: {'; '.join(problems[:3])}{more}; {_REMEDY}")
    return table


@lru_cache
def table_hash() -> str:
    """sha256 of the table as JSON with sorted keys and no spaces, in hexadecimal."""
    text = json.dumps(_table(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def entries(kernel: str) -> list[dict[str, Any]]:
    """All entries of a kernel, in the order in which they are tried. Raises KeyError."""
    found: list[dict[str, Any]] = _table()["kernels"][kernel]
    return found


def kernel_names() -> list[str]:
    return list(_table()["kernels"])


@lru_cache
def choose(kernel: str, **shape: int | bool) -> Mapping[str, Any]:
    """What a kernel uses at a shape; the shape names all that its entries ask about.

    Raises KeyError for a kernel that the table does not know and for a size that is not given.
    """
    for entry in entries(kernel):
        if all(_holds(name, bound, shape) for name, bound in entry["when"].items()):
            return MappingProxyType(entry["use"])
    raise KeyError(f"{kernel}: the table's last entry has conditions")


def _holds(name: str, bound: int | bool, shape: Mapping[str, int | bool]) -> bool:
    size = name.removesuffix("_up_to")
    return shape[name] == bound if size == name else shape[size] <= bound
