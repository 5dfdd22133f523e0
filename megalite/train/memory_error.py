"""Notes on an error of a device that is out of memory: where it happened, the plan, and remedies.

Where follows from the frames of the error's traceback, so a step keeps no record for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import FrameType

import torch
from torch import nn

from megalite.config import RunConfig
from megalite.distributed.mesh import Mesh
from megalite.pipeline.interpreter import Pass
from megalite.planner import beside_tensors, rank_memory
from megalite.planner.changes import memory_changes
from megalite.run.batch_plan import num_micro_batches
from megalite.run.pipeline_schedule import make_schedule, modelled_durations
from megalite.run.stages import stages_of
from megalite.schedules import simulate
from megalite.tensor_parallel.context import ShardedModule


@contextmanager
def explained_out_of_memory(config: RunConfig, mesh: Mesh) -> Iterator[None]:
    """Add notes to a `torch.OutOfMemoryError` that passes; the config must be resolved."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(f"out of memory on {mesh.ledger.place}: {_where(error, mesh)}")
        error.add_note(_planned(config, mesh))
        error.add_note(_remedies(config))
        raise


def _where(error: BaseException, mesh: Mesh) -> str:
    """Step, phase, microbatch, stage and module, as far as they are known."""
    ledger = mesh.ledger
    parts = [] if ledger.step is None else [f"step {ledger.step}"]
    parts.append(f"phase {ledger.phase!r}")
    module = ""
    for frame, _ in walk_tb(error.__traceback__):  # from the outermost in
        running = frame.f_locals.get("self")
        if isinstance(running, Pass):
            action = running.actions[running.index]
            parts[2:] = [f"action {action} (microbatch {action.mb} of stage {action.stage})"]
        module = _module(frame) or module
    return ", ".join([*parts, *filter(None, [module])])


def _module(frame: FrameType) -> str:
    """The module that a frame runs in, with the first and the last of its parameters; or ""."""
    # A backward is a function without a self, which has its layer at hand.
    module = frame.f_locals.get("self")
    if not isinstance(module, nn.Module):
        module = frame.f_locals.get("layer")
    if not isinstance(module, nn.Module):
        return ""
    sharded = [part for part in module.modules() if isinstance(part, ShardedModule)]
    names = [spec.name for part in sharded for spec in part.specs.values()]
    if not names:
        return ""
    held = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"in {type(module).__name__}.{frame.f_code.co_name} ({held})"


def _planned(config: RunConfig, mesh: Mesh) -> str:
    """The plan's bytes of this rank by part, and the memory of its device."""
    schedule = make_schedule(config, num_micro_batches(config))
    timeline = simulate(schedule, modelled_durations(config))
    stages = stages_of(config, schedule.place)
    memory = rank_memory(config, stages, schedule, timeline)[mesh.pp.rank]
    beside = beside_tensors(memory.total)
    unit, size = ("GiB", 2**30) if memory.total >= 2**30 else ("MiB", 2**20)
    parts = ", ".join(f"{name} {num / size:.2f}" for name, num in memory.parts.items())
    text = f"planned in {unit}: {parts}, together {memory.total / size:.2f}"
    if mesh.device.type == "cuda":
        _, total = torch.cuda.mem_get_info(mesh.device)
        text += (
            f"; CUDA, communicators and fragments take some {beside / size:.2f} more, and the "
            f"device has {total / size:.2f}"
        )
    return text


def _remedies(config: RunConfig) -> str:
    """The least change of each kind that takes less memory."""
    found = [" ".join(kind[0]) for kind in memory_changes(config) if kind]
    if not found:
        return "no setting takes less memory in this layout; take more ranks"
    return (
        f"one of these takes less memory: {'; '.join(found)}; `megalite plan CONFIG --hardware "
        "NAME` reports which of them fit"
    )
