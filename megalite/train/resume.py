"""Resuming a run from its newest sound checkpoint: find, compare, load.

Changes that would make the resumed run another run raise an error here, all of them at once and
before any tensor is read, unless the command line accepts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.find import find_latest
from megalite.config.resume import DATA, require_resume_mode
from megalite.config.saved import saved_config
from megalite.distributed.agree import Ranks, on_all_ranks, on_first_rank
from megalite.run.batch_plan import BatchPlan
from megalite.train import state
from megalite.train.blend_position import BlendPosition, resumed_position
from megalite.train.changes import (
    Changed,
    changed_data,
    changed_settings,
    require_accepted,
    resumed_plan,
    trainer_state,
    unused,
)
from megalite.train.engine import Engine
from megalite.train.kernel_choice import kernel_notice, kernel_record
from megalite.train.origin import check_origin


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that was loaded, the plan of batches and the blend from it on, the changes."""

    path: Path
    step: int
    plan: BatchPlan
    blend: BlendPosition
    saved: dict[str, Any]  # the trainer's state
    changed: Sequence[Changed]


def resume(
    engine: Engine,
    root: Path,
    data: dict[str, Any],
    accept: frozenset[str],
    report: Callable[[str], None],
) -> Resumed | None:
    """Load the newest checkpoint under `root`, None if there is none; all ranks call it.

    data: the identities of the datasets, as saved. report: prints a line. Raises CheckpointError if
    checkpoint.resume contradicts the folder, or if settings or data differ in a way that is not
    accepted.
    """
    config = engine.config
    found = find_latest(root, Ranks(engine.mesh.world))
    require_resume_mode(config.checkpoint.resume, root, None if found is None else found.path.name)
    if found is None:
        return None
    for reason in found.skipped:
        report(f"passed over: {reason}")

    # The plan first: it decides the length of the run and the learning rates that are compared.
    manifest = found.manifest
    saved = on_all_ranks(
        Ranks(engine.mesh.world), lambda: trainer_state(manifest, found.path), "resuming"
    )
    step, plan = resumed_plan(config, saved, found.path)
    old = saved_config(manifest.config, str(found.path))
    blend, has_order = resumed_position(saved, old, config, data, plan.first_sample(step))
    changed = [
        *changed_settings(old, config, plan, step, has_order),
        *changed_data(saved["data"], data),
    ]
    require_accepted(changed, accept, found.path.name)
    began = on_first_rank(
        Ranks(engine.mesh.world), lambda: check_origin(config, saved, step, found.path)
    )
    notice = kernel_notice(saved.get("kernels"), kernel_record(engine.ops), found.path.name)
    state.load_run(engine, found)

    # Only now: nothing is reported of a checkpoint that cannot be loaded.
    for line in (notice, began):
        if line is not None:
            report(line)
    for change in changed:
        if change.needs == "accept":
            report(f"accepted: {change.text}")
        elif change.name == DATA:
            report(change.text)
    for name in unused(changed, accept):
        report(f"--accept {name}: not changed")
    report(f"resumed from {found.path} at step {step}")
    return Resumed(found.path, step, plan, blend, saved, changed)
