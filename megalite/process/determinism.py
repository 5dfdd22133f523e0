"""The switch that makes runs repeat bit for bit, for one machine, layout and software.

On the CPU runs repeat bit for bit anyway: one thread a process, sums in a fixed order, collectives
summed in axis order. The switch adds that an operation without a deterministic algorithm raises an
error. On CUDA it picks deterministic algorithms where there is a choice (atomics in scatters, the
backward of attention) and gives cuBLAS a workspace of its own, which must be known before the first
matrix product on the GPU. It costs speed, and promises nothing between different GPUs or versions.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

import torch

from megalite.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE = (":4096:8", ":16:8")  # the values that cuBLAS documents as deterministic


def prepare_deterministic(environ: MutableMapping[str, str] | None = None) -> None:
    """Set what must be in the environment before CUDA starts; children inherit it.

    Raises ConfigError if the variable is there already with a value that is not deterministic.
    """
    environ = os.environ if environ is None else environ
    found = environ.setdefault(WORKSPACE, _REPEATABLE[0])
    if found not in _REPEATABLE:
        raise ConfigError(
            f"train.deterministic=true, but the environment has {WORKSPACE}={found}; unset it, or "
            f"use {' or '.join(_REPEATABLE)}"
        )


def use_deterministic(on: bool) -> None:
    """Require deterministic algorithms in this process, or stop requiring them."""
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.benchmark = False
    # torch would also fill each new buffer, which exposes reads of memory that nobody wrote. It
    # costs one more write of every buffer.
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False


def determinism() -> dict[str, Any]:
    """The settings that hold in this process, for the record of a run."""
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "cublas_workspace": os.environ.get(WORKSPACE),
    }
