"""The values of a run's first line and of a step's line, and the console's lines at its start.

Pure functions. records.py documents the names.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.config import RunConfig
from megalite.optim.distributed_optimizer import StepResult
from megalite.optim.state_tensors import MemoryReport
from megalite.process.determinism import determinism
from megalite.record import metrics
from megalite.record.metrics import Device
from megalite.run.batch_plan import BatchPlan
from megalite.run.model_math import flops_text, parameter_counts, training_flops
from megalite.wording import number_of

_MIB = 2**20


def run_record(
    config: RunConfig,
    world_size: int,
    device: Device,
    memory: MemoryReport,
    kernels: dict[str, Any],
) -> dict[str, Any]:
    """The values of a `run` or `restart` line: the config, the hardware, the software."""
    return {
        "time": time.time(),
        "config": config.model_dump(mode="json"),
        "versions": metrics.versions(),
        "git_commit": metrics.git_commit(),
        "world_size": world_size,
        "hardware": asdict(device),
        "parameters": parameter_counts(config.model).total(),
        "flops_per_token": asdict(training_flops(config.model, config.data.seq_length)),
        "memory": asdict(memory),
        "kernels": kernels,
        "deterministic": determinism(),
    }


def run_lines(
    folder: Path,
    config: RunConfig,
    world_size: int,
    device: Device,
    memory: MemoryReport,
    kernels: str,
) -> list[str]:
    """The console's lines about a run that starts: layout, memory, FLOPs."""
    parallel, parameters = config.parallel, parameter_counts(config.model).total()
    ranks = number_of(world_size, "rank")
    return [
        f"run {folder}: {parameters / 1e6:.2f}M parameters, {ranks} = tp {parallel.tp} x pp "
        f"{parallel.pp}{f' (x {parallel.vpp} chunks)' if parallel.vpp > 1 else ''} x dp "
        f"{parallel.dp}, {config.pipeline.schedule}, ZeRO-{config.optimizer.zero}, "
        f"{config.train.dtype} on {device.name}, {kernels} kernels",
        f"memory of rank 0: weights {memory.param_bytes / _MIB:.2f} MiB, gradients "
        f"{memory.grad_bytes / _MIB:.2f} MiB, optimizer {memory.state_bytes / _MIB:.2f} MiB "
        f"(of all {memory.padding_bytes / _MIB:.3f} MiB padding), "
        f"{memory.bytes_per_parameter:.2f} bytes a parameter",
        flops_text(config.model, config.data.seq_length),
    ]


@dataclass(frozen=True)
class StepEdge:
    """The numbers that the ranks agree on at the end of a step, by one all-reduce."""

    loss: float  # cross entropy, with label smoothing where it is asked for
    z_loss: float
    signalled: bool  # some rank has had a signal
    save_due: bool  # by the time since the last save, as rank 0 has it
    wall_s: float  # from the last step's end to this one's; mean over ranks, as the parts are
    parts_s: dict[str, float]


def step_record(
    config: RunConfig,
    device: Device,
    plan: BatchPlan,
    world_size: int,
    *,
    step: int,
    edge: StepEdge,
    lr: float,
    loss_tokens: int,
    result: StepResult,
    memory_peak_bytes: int,
) -> dict[str, Any]:
    """The values of the `step` line of the step that ended as the `step`-th."""
    batch, samples = plan.global_batch(step - 1), plan.first_sample(step)
    rates = metrics.step_rates(batch, edge.wall_s, world_size, config, device)
    seq_length = config.data.seq_length
    return {
        "step": step,
        "loss": edge.loss,
        **({"z_loss": edge.z_loss} if config.train.z_loss else {}),
        "lr": lr,
        "loss_tokens": loss_tokens,
        "memory_peak_bytes": memory_peak_bytes,
        "grad_norm": result.grad_norm,
        "loss_scale": result.loss_scale,
        "step_time_s": edge.wall_s,
        "tokens": batch * seq_length,
        **asdict(rates),
        "global_batch": batch,
        "consumed_samples": samples,
        "consumed_tokens": samples * seq_length,
        **{f"time_{part}_s": seconds for part, seconds in edge.parts_s.items()},
    }
