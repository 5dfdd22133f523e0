"""Triton's interpreter as tests use it: repaired, its programs in any order, overflow refused.

The repairs are the product's (`megalite.kernels.triton.interpreter_repairs`), which
`kernels.backend=interpret` installs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import interpreter as interp

from megalite.kernels.triton import interpreter_repairs as interpreter

builder = interp.interpreter_builder


@dataclasses.dataclass
class _Order:
    reverse: bool = False


_order = _Order()


def _patch_program_order() -> None:
    original = interp.InterpreterBuilder.set_grid_idx

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        if _order.reverse:
            x, y, z = (n - 1 - i for n, i in zip(self.grid_dim, (x, y, z), strict=True))
        original(self, x, y, z)

    interp.InterpreterBuilder.set_grid_idx = set_grid_idx


@contextmanager
def reversed_programs() -> Iterator[None]:
    """Run the programs of every launch last to first."""
    _order.reverse = True
    try:
        yield
    finally:
        _order.reverse = False


@contextmanager
def overflow_checks() -> Iterator[None]:
    """Make the interpreter refuse int32 arithmetic that wraps."""
    kept = builder.options
    builder.options = dataclasses.replace(kept, sanitize_overflow=True, debug=True)
    try:
        yield
    finally:
        builder.options = kept


def install() -> None:
    """Repair the interpreter of this process."""
    interpreter.install()
    _patch_program_order()
