"""The numbers of a step beside its loss: rates, memory, device.

Writes no files (records.py does) and computes nothing that training depends on.
"""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from megalite.config import ModelConfig
from megalite.hardware import peak_tflops
from megalite.model_math import mfu, training_flops


@dataclass(frozen=True)
class Device:
    """What this process computes on. `peak_tflops` and `memory_bytes` are None where unknown."""

    name: str
    is_gpu: bool
    peak_tflops: float | None
    memory_bytes: int | None


def describe_device(device: torch.device, dtype: str) -> Device:
    """Name and peak of the device; a device that no hardware file names has no peak."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        total = torch.cuda.get_device_properties(device).total_memory
        return Device(name, True, peak_tflops(name, dtype), total)
    return Device(platform.processor() or platform.machine() or "cpu", False, None, None)


def memory_peak_bytes(device: torch.device) -> int:
    """Most memory this process has held: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


@dataclass(frozen=True)
class Rates:
    """Speed of a step over all ranks, under the names of metrics.jsonl."""

    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float | None
    mfu_causal: float | None


def step_rates(
    tokens: int, wall_s: float, world_size: int, model: ModelConfig, seq_length: int, device: Device
) -> Rates:
    """Rates of a step of `tokens` input tokens; MFU None on a device without a known peak."""
    per_s = tokens / wall_s
    flops = training_flops(model, seq_length)
    used = mfu(per_s, model, seq_length, device.peak_tflops, world_size)
    return Rates(
        tokens_per_s_per_gpu=per_s / world_size,
        model_tflops_per_gpu=flops.total_full * per_s / world_size / 1e12,
        mfu=None if used is None else used.full,
        mfu_causal=None if used is None else used.causal,
    )


def versions() -> dict[str, str]:
    """Versions that decide what a run computes."""
    return {
        "megalite": version("megalite"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def git_commit() -> str | None:
    """Commit of the source tree that runs, None for an installed package."""
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
    gib = 2**30
    total = f"/{device.memory_bytes / gib:.1f}" if device.memory_bytes else ""
    return f"{used_bytes / gib:.1f}{total} GiB"
