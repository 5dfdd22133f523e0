"""Variables of the environment that torch reads on GPUs, with megalite's defaults for them.

A variable that the user has set wins, under its present and its earlier name. torch reads them when
CUDA and NCCL start, so they are set in the process that starts the ranks, or first thing in a rank.
Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

# The names that torch 2.11 to 2.13 reads, the present one first.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_RECORDED = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMPS = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_DUMP_PREFIX = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

_OFF = ("0", "n", "no", "false")  # as torch reads them
_NUM_RECORDED = 2000  # operations; CUDA's queues hold about a thousand


def prepare_gpus(folder: Path, environ: MutableMapping[str, str] | None = None) -> None:
    """Set what the user has not: growing memory segments, and a flight recorder of NCCL.

    Segments that grow leave fewer holes than those of fixed sizes. The recorder keeps the last
    operations of a rank, and writes them into the run's `folder` when a collective times out.
    """
    environ = os.environ if environ is None else environ
    defaults = {
        _ALLOCATOR: "expandable_segments:True",
        _RECORDED: str(_NUM_RECORDED),
        _DUMPS: "1",
        _DUMP_PREFIX: str(folder.resolve() / "flight_recorder_rank_"),
    }
    for names, value in defaults.items():
        if not any(name in environ for name in names):
            environ[names[0]] = value


def recorder_advice(environ: MutableMapping[str, str] | None = None) -> str:
    """A line on where torch's flight recorder writes; "" if it does not."""
    environ = os.environ if environ is None else environ
    prefix, recorded, dumps = (
        next((environ[name] for name in names if name in environ), "")
        for names in (_DUMP_PREFIX, _RECORDED, _DUMPS)
    )
    if not prefix or recorded == "0" or dumps.lower() in _OFF:
        return ""
    path = Path(prefix)
    return (
        f"after train.timeout_s torch writes the last operations of each rank to {prefix}RANK; "
        f"torchfrtrace --prefix {path.name} {path.parent} compares them"
    )
