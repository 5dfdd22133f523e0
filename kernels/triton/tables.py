"""Tiles, block sizes, warps and stages of the kernels: a committed table, never tuned at run time.

`configs/sm90.json` holds a list of entries for each kernel. The first entry whose conditions
("when") all hold for a shape gives the values to "use"; "chosen" gives the reason for them, and
"static" the cases of the table of machine code that show them. A condition `NAME_up_to` is an upper
bound, any other is equality. The last entry of a kernel has no conditions: it serves every shape
that no other entry matches, and uses the least resources. The table was chosen for sm_90 and is
used on every architecture.

Other block sizes sum in another order and give other bits, so all ranks share one table, and a run
records its hash (`table_hash`). Imports neither torch nor triton.
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
# Contraction to fused multiply-adds is set here, because Triton's default for it changes.
OPTIONS = {"enable_fp_fusion": True}
_SIZES = ("block", "rows", "columns", "inner")  # which kernels take as they are
TABLE = Path(__file__).resolve().parents[1] / "configs" / "sm90.json"


@lru_cache
def _table() -> dict[str, Any]:
    """The table, read once. Raises BackendError if it cannot be read or has faults."""
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


@lru_cache
def choose(kernel: str, **shape: int | bool) -> Mapping[str, Any]:
    """The `prepared` values that a kernel uses at a shape, with every size that its entries name.

    Raises KeyError for a kernel that is not in the table and for a size that is not given.
    """
    for entry in entries(kernel):
        if all(_holds(name, bound, shape) for name, bound in entry["when"].items()):
            return prepared(entry["use"])
    raise KeyError(f"{kernel}: the table's last entry has conditions")


def prepared(use: Mapping[str, Any]) -> Mapping[str, Any]:
    """An entry's values, and "launch": the arguments of a launch that they give."""
    sizes = {name.upper(): use[name] for name in _SIZES if name in use}
    launch = {**sizes, "num_warps": use["warps"], **OPTIONS}
    if "inner" in use:  # a loop of products, which Triton pipelines
        launch["num_stages"] = use["stages"]
    return MappingProxyType({**use, "launch": MappingProxyType(launch)})


def _holds(name: str, bound: int | bool, shape: Mapping[str, int | bool]) -> bool:
    """True if a condition of an entry holds for a shape."""
    size = name.removesuffix("_up_to")
    return shape[name] == bound if size == name else shape[size] <= bound
