"""The time line of one step's pipeline, written into the run folder."""

from __future__ import annotations

from pathlib import Path

from megalite.distributed import comm
from megalite.schedules import Action
from megalite.schedules.simulate import TimedAction
from megalite.schedules.view.trace import TRACE_FILE, Measured
from megalite.train.engine import Engine


def save_trace(engine: Engine, folder: Path, step: int) -> None:
    """Write the time line of `step`, the engine's last with `trace`; all ranks call, rank 0 writes.

    The lines are those of rank 0's pipeline: first replica, first tensor-parallel rank.
    """
    mine = [[*span.action, span.start, span.end] for span in engine.runtime.trace]
    everyone = comm.all_gather_object(mine, engine.mesh.pp)
    if engine.mesh.rank == 0:
        spans = [
            [
                TimedAction(Action(kind, stage, mb), start, end)
                for kind, stage, mb, start, end in row
            ]
            for row in everyone
        ]
        name = str(engine.config.pipeline.schedule)
        measured = Measured.of(name, step, engine.runtime.schedule, spans)
        (folder / TRACE_FILE).write_text(measured.to_json(), encoding="utf-8")
