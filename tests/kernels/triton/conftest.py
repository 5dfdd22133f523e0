"""Interpreted kernels are tested in a process of their own, which test_own_process.py starts.

TRITON_INTERPRET is read when a kernel is decorated, and an interpreted process can no longer
compile. So in an ordinary pytest run only that one file of this folder is collected, and in its
child, where the variable is set from the start, every other one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
STARTER = "test_own_process.py"
OTHERS = sorted(path.name for path in FOLDER.glob("test_*.py") if path.name != STARTER)

collect_ignore = [STARTER] if INTERPRETED else OTHERS

if INTERPRETED:
    from tests.kernels.triton.kit import memory_check, shim

    shim.install()
    CHECKER = memory_check.Checker()
    CHECKER.install()

    @pytest.fixture
    def checker() -> memory_check.Checker:
        """The memory and race checker, which is on in every test."""
        return CHECKER

    @pytest.fixture(autouse=True)
    def _one_thread() -> Iterator[None]:
        import torch

        kept = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(kept)

    @pytest.fixture(autouse=True)
    def _poisoned_memory() -> Iterator[None]:
        """Whatever a launcher allocates without values is full of NaN."""
        import torch

        torch.use_deterministic_algorithms(True)  # makes torch fill fresh memory
        assert torch.empty(3).isnan().all()
        yield
        torch.use_deterministic_algorithms(False)
