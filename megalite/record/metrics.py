"""The numbers in a step's record beside its loss: rates, memory, device.

Writes no files (records.py does) and computes nothing that training depends on.
"""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from megalite import __version__
from megalite.config import RunConfig
from megalite.run.hardware import find_device, load_device_hardware, number_format
from megalite.run.model_math import mfu, training_flops


@dataclass(frozen=True)
class Device:
    """The device of this process. `peak_tflops` and `memory_bytes` are None where unknown."""

    name: str
    is_gpu: bool
    peak_tflops: float | None
    memory_bytes: int | None


def describe_device(device: torch.device, config: RunConfig) -> Device:
    """The device with its peak for the run's number format; None where no hardware file names it.

    With `log.hardware`, a hardware file of the user's own, the peak comes from that file, which
    must name the device.
    """
    train, own = config.train, config.log.hardware
    memory = None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        name = platform.processor() or platform.machine() or "cpu"
    known = find_device(name) if own is None else load_device_hardware(own, name)
    products = number_format(train.dtype, train.tf32)
    peak = None if known is None else known.peak_tflops.get(products)
    return Device(name, device.type == "cuda", peak, memory)


def memory_peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


@dataclass(frozen=True)
class Rates:
    """The speed of a step over all ranks, under the names of metrics.jsonl.

    `mfu` counts attention as if every token saw the whole sequence, `mfu_causal` the part that the
    mask leaves (see run/model_math.py).
    """

    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float | None
    mfu_causal: float | None


def step_rates(
    global_batch: int, wall_s: float, world_size: int, config: RunConfig, device: Device
) -> Rates:
    """Rates of a step of `global_batch` samples; MFU is None on a device without a known peak."""
    model, seq_length = config.model, config.data.seq_length
    tokens_per_s = global_batch * seq_length / wall_s
    flops = training_flops(model, seq_length)
    used = mfu(tokens_per_s, model, seq_length, device.peak_tflops, world_size)
    return Rates(
        tokens_per_s_per_gpu=tokens_per_s / world_size,
        model_tflops_per_gpu=flops.total_full * tokens_per_s / world_size / 1e12,
        mfu=None if used is None else used.full,
        mfu_causal=None if used is None else used.causal,
    )


def versions() -> dict[str, str]:
    """The versions of the software that a run's results depend on."""
    return {
        "megalite": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def git_commit() -> str | None:
    """The commit of the source tree that runs; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def device_memory_text(used_bytes: int, device: Device) -> str:
    """Memory used, and of how much if that is known, in GiB: "61.2/139.8 GiB"."""
    gib = 2**30
    total = f"/{device.memory_bytes / gib:.1f}" if device.memory_bytes else ""
    return f"{used_bytes / gib:.1f}{total} GiB"
