"""Runs any pipeline schedule on this rank's model chunks: the same lines for every schedule.

Independent of model, optimizer and data: chunks are used through `PipelineChunk` alone, and
microbatches are passed on to them. With one pipeline rank nothing is sent and the same lines run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.distributed.clock import seconds_between
from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError
from megalite.pipeline.channels import Channels, edges_of, require_same_program
from megalite.pipeline.chunk import BoundarySpec, PipelineChunk
from megalite.pipeline.interpreter import Callbacks, Pass
from megalite.schedules import (
    Action,
    Schedule,
    check_posted,
    check_program,
    forward_schedule,
    lower,
    post_ahead,
)
from megalite.schedules.simulate import TimedAction
from megalite.wording import number_of


class PipelineRuntime:
    """A schedule, this rank's chunks of the model, and the channels to the neighbours.

    `chunks` are in the order of `schedule.stages_of(mesh.pp.rank)`; the callbacks are those of
    `Callbacks`. All ranks of the world make it at the same point of their set-up. Raises
    ScheduleError if the schedule is not valid, and ConfigError on all ranks of a pipeline if they
    disagree about boundary or schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        chunks: Sequence[PipelineChunk],
        mesh: Mesh,
        boundary: BoundarySpec,
        *,
        on_last_backward_start: Callable[[int], None] | None = None,
        on_reduce: Callable[[int], None] | None = None,
        on_action: Callable[[Action], None] | None = None,
    ) -> None:
        if schedule.p != mesh.pp.size or len(chunks) != schedule.v:
            raise ConfigError(
                f"the schedule is for {number_of(schedule.p, 'pipeline rank')} with "
                f"{number_of(schedule.v, 'chunk')} each, "
                f"got {number_of(mesh.pp.size, 'rank')} and {number_of(len(chunks), 'chunk')}; "
                "make parallel.pp and vpp agree"
            )
        self.schedule = schedule

        # Of the last run: seconds from its start; empty unless asked for.
        self.trace: list[TimedAction] = []

        self._chunks, self._mesh, self._boundary = chunks, mesh, boundary
        self._callbacks = Callbacks(on_last_backward_start, on_reduce, on_action)
        self._channels = Channels(mesh, boundary)
        self._pass: Pass | None = None
        self._forward_programs: dict[int, Schedule] = {}  # by number of microbatches

        # All ranks compare their programs before the first of them waits for a message.
        self._program = self._checked(lower(schedule), forward_only=False)
        self._channels.open(edges_of(schedule))

    def run(
        self, micro_batches: Sequence[Any], *, loss_scale: float = 1.0, trace: bool = False
    ) -> list[Tensor]:
        """Run forward and backward of one step.

        Returns the detached loss share of each microbatch on the rank of the last stage, [] on the
        others. Gradients are those of the loss times `loss_scale`; the loss is not scaled. `trace`
        fills `self.trace`, where an action starts once its message has arrived.

        An error has a note with the program around the current action. Messages may then be left in
        the channels, so with several ranks the processes must end.
        """
        if len(micro_batches) != self.schedule.m:
            raise ConfigError(
                f"the schedule has {number_of(self.schedule.m, 'microbatch')}, got "
                f"{len(micro_batches)}"
            )
        return self._run(
            self._program, micro_batches, train=True, loss_scale=loss_scale, trace=trace
        )

    def run_forward(self, micro_batches: Sequence[Any]) -> list[Tensor]:
        """Forwards only, without gradients, for any number >= 1 of microbatches; returns as `run`.

        The first use with a number of microbatches compares the program over the pipeline.
        """
        program = self._forward_program(len(micro_batches))
        with torch.no_grad():
            return self._run(program, micro_batches, train=False)

    def where(self) -> str:
        """The current action among its neighbours, as text; callable from another thread."""
        current = self._pass
        return "pipeline: not running" if current is None else current.where()

    def _run(
        self,
        program: Schedule,
        micro_batches: Sequence[Any],
        *,
        train: bool,
        loss_scale: float = 1.0,
        trace: bool = False,
    ) -> list[Tensor]:
        current = self._pass = Pass(
            program,
            self._mesh.pp.rank,
            self._chunks,
            self._channels,
            self._boundary,
            self._mesh.ledger.clock,
            self._callbacks,
            train=train,
            loss_scale=loss_scale,
        )
        losses = current.run(micro_batches, trace=trace)

        # Not after an error: then `where` still describes the action that raised it.
        self._pass = None
        self.trace = _spans(current) if trace else []
        return losses

    def _forward_program(self, num_micro_batches: int) -> Schedule:
        if num_micro_batches not in self._forward_programs:
            program = lower(forward_schedule(self.schedule.place, num_micro_batches))
            self._forward_programs[num_micro_batches] = self._checked(program, forward_only=True)
        return self._forward_programs[num_micro_batches]

    def _checked(self, program: Schedule, *, forward_only: bool) -> Schedule:
        """The program to run, proven on its own and compared over the pipeline."""
        check_program(program, forward_only=forward_only)
        if self._mesh.device.type == "cpu":
            # Posting a receive costs the host 0.2-0.4 ms on gloo, so it is done ahead. On a GPU it
            # stays in place: until its message comes a posted receive holds multiprocessors, and
            # where kernels wait for each other in one queue, posted ahead it could wait for ever.
            program = post_ahead(program)
            check_posted(program)
        require_same_program(self._mesh, self._boundary, program)
        return program


def _spans(finished: Pass) -> list[TimedAction]:
    """Start and end of each action, in seconds from the start of the pass."""
    assert finished.marks is not None
    begin, *ends = finished.marks
    spans, before = [], begin
    for index, (action, end) in enumerate(zip(finished.actions, ends, strict=True)):
        start = finished.ready.get(index, before)
        spans.append(
            TimedAction(action, seconds_between(begin, start), seconds_between(begin, end))
        )
        before = end
    return spans
