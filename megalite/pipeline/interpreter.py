"""One pass of one pipeline rank through its program: one method per kind of action.

The program is a list of actions in their order; no schedule has code of its own here. All that a
later action needs is kept in tables keyed by (stage, microbatch), which are empty again at the end.
Programs are built and compared in `runtime`.

Memory: after a forward only the edge into its graph and the input leaf are kept, and the output
until its send is done. A received buffer is used by one microbatch only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.distributed.clock import Clock, Mark
from megalite.distributed.comm import Handle
from megalite.errors import ConfigError
from megalite.pipeline.channels import Channels
from megalite.pipeline.chunk import BoundarySpec, PipelineChunk
from megalite.schedules import Action, Schedule

Key = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class Callbacks:
    """Functions that a pass calls; chunks are numbered on their rank, from 0.

    on_last_backward_start: with a chunk, before its last backward of the step. on_reduce: with a
    chunk whose gradients are complete. on_action: before every action.
    """

    on_last_backward_start: Callable[[int], None] | None = None
    on_reduce: Callable[[int], None] | None = None
    on_action: Callable[[Action], None] | None = None


class Pass:
    """Runs a program once.

    train: there are backwards, so that graphs and inputs are kept for them. loss_scale: the
    gradient of the loss that a backward starts from.
    """

    def __init__(
        self,
        program: Schedule,
        pp_rank: int,
        chunks: Sequence[PipelineChunk],
        channels: Channels,
        boundary: BoundarySpec,
        clock: Clock,
        callbacks: Callbacks,
        *,
        train: bool,
        loss_scale: float = 1.0,
    ) -> None:
        self.program, self.pp_rank = program, pp_rank
        self.channels, self.boundary, self.clock = channels, boundary, clock
        self.callbacks = callbacks
        self.train, self.loss_scale = train, loss_scale
        self.actions = program.ranks[pp_rank]
        stages = program.stages_of(pp_rank)
        self._chunks = dict(zip(stages, chunks, strict=True))  # by stage
        self._chunk_numbers = {stage: number for number, stage in enumerate(stages)}
        self._last_stage = program.num_stages - 1
        self._last_starts = last_backward_starts(self.actions)
        self._recomputed = frozenset(action for action in self.actions if action.kind == "R")

        # Read by the runtime: the place of a hang, and a trace.
        self.index = 0  # of the current action
        self.marks: list[Mark] | None = None  # one before each action and one at the end
        self.ready: dict[int, Mark] = {}  # by an action's index: the arrival of its message

        # Results that later actions take; each is popped by the one action that needs it.
        self._edges: dict[Key, GradientEdge] = {}
        self._inputs: dict[Key, Tensor] = {}
        self._outputs: dict[Key, Tensor] = {}
        self._input_grads: dict[Key, Tensor] = {}
        self._weight_grads: dict[Key, list[Callable[[], None]]] = {}
        self._received: dict[Action, Handle] = {}
        self._losses: dict[int, Tensor] = {}
        self._micro_batches: Sequence[Any] = ()

        self._run = {
            "F": self._forward,
            "R": self._recompute,
            "B": self._backward_input,
            "W": self._backward_weight,
            "BW": self._backward,
            "SF": self._send_output,
            "SB": self._send_input_grad,
            "RF": self._post_receive,
            "RB": self._post_receive,
            "REDUCE": self._reduce,
        }

    def run(self, micro_batches: Sequence[Any], *, trace: bool) -> list[Tensor]:
        """Losses of the microbatches, detached, on the rank of the last stage; [] on the others."""
        self._micro_batches = micro_batches
        self.marks = [] if trace else None
        try:
            for index, action in enumerate(self.actions):
                self.index = index
                self._mark()
                self._announce(action)
                self._run[action.kind](action)
            self._mark()
            self.channels.finish()
        except Exception as error:
            error.add_note(self.where())
            raise
        left = (self._edges, self._inputs, self._outputs, self._input_grads)
        assert not any((*left, self._weight_grads, self._received)), "program left work undone"
        return [self._losses[mb] for mb in sorted(self._losses)]

    def where(self) -> str:
        """The current action among its neighbours, as text."""
        first = max(0, self.index - 4)
        around = [
            f">>{action}<<" if index == self.index else str(action)
            for index, action in enumerate(self.actions[: self.index + 5])
        ][first:]
        return (
            f"pipeline rank {self.pp_rank} of {self.program.p}, action {self.index + 1} of "
            f"{len(self.actions)}: {' '.join(around)}"
        )

    def _announce(self, action: Action) -> None:
        if self.callbacks.on_action is not None:
            self.callbacks.on_action(action)
        if action in self._last_starts and self.callbacks.on_last_backward_start is not None:
            self.callbacks.on_last_backward_start(self._chunk_numbers[action.stage])

    def _forward(self, action: Action) -> None:
        # A leaf of its own, so that the backward ends here and leaves the gradient on it.
        key = (action.stage, action.mb)
        input_tD = self._take_input(action)
        if input_tD is not None and self.train:
            input_tD = input_tD.detach().requires_grad_()
            self._inputs[key] = input_tD

        # A forward that is recomputed makes its graph then.
        is_recomputed = action._replace(kind="R") in self._recomputed
        with torch.no_grad() if is_recomputed else contextlib.nullcontext():
            output = self._chunks[action.stage].forward(input_tD, self._micro_batches[action.mb])
        if self.train and not is_recomputed:
            self._edges[key] = get_gradient_edge(output)

        if action.stage == self._last_stage:
            self._check_loss(action, output)
            self._losses[action.mb] = output.detach()
        else:
            self._check_output(action, output)
            self._outputs[key] = output.detach()

    def _recompute(self, action: Action) -> None:
        """The forward again, with a graph this time; its output is the same and is dropped.

        The loss is not the same and is replaced: z-loss and smoothing are only in this one, because
        they are added only while gradients are recorded.
        """
        key = (action.stage, action.mb)
        output = self._chunks[action.stage].forward(
            self._inputs.get(key), self._micro_batches[action.mb]
        )
        self._edges[key] = get_gradient_edge(output)
        if action.stage == self._last_stage:
            self._losses[action.mb] = output.detach()

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.mb)
        grad = self._take_output_grad(action)
        torch.autograd.backward((self._edges.pop(key),), (grad,))
        if action.stage == 0:
            return
        input_grad = self._inputs.pop(key).grad
        if input_grad is None:
            raise ConfigError(
                f"stage {action.stage} gave no gradient for its input: its output must depend on it"
            )
        self._input_grads[key] = input_grad

    def _backward_input(self, action: Action) -> None:
        """The backward with the weight gradients queued instead of computed."""
        store = self._chunks[action.stage].grads
        queue: list[Callable[[], None]] = []
        store.deferred = queue
        try:
            self._backward(action)
        finally:
            store.deferred = None
        self._weight_grads[action.stage, action.mb] = queue

    def _backward_weight(self, action: Action) -> None:
        for compute in self._weight_grads.pop((action.stage, action.mb)):
            compute()

    def _reduce(self, action: Action) -> None:
        if self.callbacks.on_reduce is not None:
            self.callbacks.on_reduce(self._chunk_numbers[action.stage])

    def _send_output(self, action: Action) -> None:
        peer_pp = self.program.place[action.stage + 1]
        self.channels.send(self._outputs.pop((action.stage, action.mb)), peer_pp)

    def _send_input_grad(self, action: Action) -> None:
        peer_pp = self.program.place[action.stage - 1]
        self.channels.send(self._input_grads.pop((action.stage, action.mb)), peer_pp)

    def _post_receive(self, action: Action) -> None:
        peer_pp, _ = self.program.edge_of(action)
        self._received[action] = self.channels.receive(peer_pp)

    def _take_input(self, action: Action) -> Tensor | None:
        """None for the first stage, the previous stage's output if on this rank, or a message."""
        stage, mb = action.stage, action.mb
        if stage == 0:
            return None
        if self.program.place[stage - 1] == self.pp_rank:
            return self._outputs.pop((stage - 1, mb))
        return self._arrived(Action("RF", stage, mb))

    def _take_output_grad(self, action: Action) -> Tensor:
        """The loss scale at the loss, the next stage's gradient if on this rank, or a message."""
        stage, mb = action.stage, action.mb
        if stage == self._last_stage:
            return torch.full_like(self._losses[mb], self.loss_scale)
        if self.program.place[stage + 1] == self.pp_rank:
            return self._input_grads.pop((stage + 1, mb))
        return self._arrived(Action("RB", stage, mb))

    def _arrived(self, receive: Action) -> Tensor:
        """The message of a posted receive; a trace has the wait apart from the action itself."""
        message = self._received.pop(receive).wait()
        if self.marks is not None:
            self.ready[self.index] = self.clock.mark()
        return message

    def _check_output(self, action: Action, output: Tensor) -> None:
        if tuple(output.shape) != self.boundary.shape or output.dtype != self.boundary.dtype:
            got = BoundarySpec(tuple(output.shape), output.dtype)
            raise ConfigError(
                f"stage {action.stage} returned {got}, but stages pass on {self.boundary}; "
                "make the stage's output and the runtime's boundary the same"
            )

    def _check_loss(self, action: Action, loss: Tensor) -> None:
        if loss.dim() != 0:
            raise ConfigError(
                f"the last stage ({action.stage}) returned shape {list(loss.shape)}; it must "
                "return the loss as a scalar"
            )

    def _mark(self) -> None:
        if self.marks is not None:
            self.marks.append(self.clock.mark())


def last_backward_starts(actions: Sequence[Action]) -> frozenset[Action]:
    """For each stage, the action from which on all weight gradients are the step's last.

    It is the last BW; or the last B, if only its own W follows; or the last W, if weight gradients
    of earlier microbatches are deferred until after the last B.
    """
    backwards: dict[int, list[Action]] = {}
    for action in actions:
        if action.kind in ("B", "W", "BW"):
            backwards.setdefault(action.stage, []).append(action)
    starts = set()
    for stage_actions in backwards.values():
        start = stage_actions[-1]
        if stage_actions[-2:-1] == [start._replace(kind="B")]:
            start = stage_actions[-2]
        starts.add(start)
    return frozenset(starts)
