"""Fixtures of the data tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.kit import Documents, write_dataset


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """make(documents, vocab_size=1000) -> prefix"""

    def build(documents: Documents, vocab_size: int = 1000, name: str = "data") -> Path:
        return write_dataset(tmp_path / name, documents, vocab_size)

    return build


@pytest.fixture
def make_stream(make: Callable[..., Path]) -> Callable[[int], Path]:
    """make_stream(T) -> prefix of one document with tokens 0 .. T - 1"""
    return lambda count: make([np.arange(count)], vocab_size=max(count, 1))
