"""From the newest sound checkpoint back into a run: found, compared, loaded.

Everything that would make the resumed run another run is refused here, all at once and before any
tensor is read, unless the command line accepts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.find import Checkpoint
from megalite.config import RunConfig
from megalite.config.resume import DATA
from megalite.errors import CheckpointError
from megalite.run.batch_plan import BatchPlan, BatchStage, batch_plan, horizon_steps
from megalite.train import state
from megalite.train.changes import (
    Changed,
    changed_data,
    changed_settings,
    refuse,
    saved_config,
    unused,
)
from megalite.train.engine import Engine
from megalite.train.kernel_choice import kernel_notice, kernel_record


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on from, its batches before and after, and what has changed."""

    path: Path
    step: int
    plan: BatchPlan
    saved: dict[str, Any]  # the trainer's state
    changed: Sequence[Changed]


def resume(
    engine: Engine,
    root: Path,
    data: dict[str, Any],
    accept: frozenset[str],
    say: Callable[[str], None],
) -> Resumed | None:
    """Load the newest checkpoint under `root`, None if there is none; all ranks call it.

    Raises CheckpointError when checkpoint.resume forbids what is found, or when settings or data
    differ in a way that is not accepted.
    """
    config = engine.config
    found = state.find_run(root, engine.mesh)
    if not _wanted(found, root, config):
        return None
    assert found is not None
    for reason in found.skipped:
        say(f"passed over: {reason}")
    manifest: Any = found.manifest
    saved: dict[str, Any] = manifest.state["trainer"]
    step = int(saved["step"])
    plan = batch_plan(config, [BatchStage(*stage) for stage in saved["stages"]], step)
    steps = horizon_steps(config, plan)
    if step > steps:
        raise CheckpointError(
            f"{found.path} is beyond train.steps={steps}; raise train.steps, "
            "or start a run with another name"
        )
    old = saved_config(manifest.config, found.path.name)
    changed = [
        *changed_settings(old, config, plan, step),
        *changed_data(saved["data"], data),
    ]
    refuse(changed, accept, found.path.name)
    notice = kernel_notice(saved.get("kernels"), kernel_record(engine.ops), found.path.name)
    state.load_run(engine, found)
    if notice is not None:
        say(notice)
    for change in changed:
        if change.needs == "accept":
            say(f"accepted: {change.text}")
        elif change.name == DATA:
            say(change.text)
    for name in unused(changed, accept):
        say(f"--accept {name}: not changed")
    say(f"resumed from {found.path} at step {step}")
    return Resumed(found.path, step, plan, saved, changed)


def _wanted(found: Checkpoint | None, root: Path, config: RunConfig) -> bool:
    """Whether there is something to resume from, and checkpoint.resume agrees."""
    mode = config.checkpoint.resume
    if found is None:
        if mode == "must":
            raise CheckpointError(
                f'checkpoint.resume="must", but {root} holds no checkpoint; '
                "check name and out, or set checkpoint.resume to auto"
            )
        return False
    if mode == "never":
        raise CheckpointError(
            f'checkpoint.resume="never", but {root} holds {found.path.name}; '
            "give the run another name, or remove the folder"
        )
    return True
