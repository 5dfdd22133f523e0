"""Bytes of each pipeline rank over a step: states, and what its schedule holds of microbatches.

Ranks of one pipeline rank are alike: tensor parallelism cuts evenly, and so does ZeRO. Counted are
tensors. A GPU's process takes more, which `beside_tensors` estimates: CUDA's context and libraries
and the buffers of communicators (1 to 3 GiB in published runs), and memory that the allocator has
but cannot use (2 to 9 % of the tensors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config import RunConfig
from megalite.planner.activations import held_by
from megalite.planner.states import States, rank_states
from megalite.run.parameters import ModelStage
from megalite.schedules import Schedule, Timeline
from megalite.schedules.memory import MicrobatchMemory, memory_over_time, peak_memory


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. `activations`: the most that its schedule holds at once, with weight
    gradients that are put off; `working`: what a backward, and messages, take beside that.
    """

    states: States
    activations: int
    working: int

    @property
    def total(self) -> int:
        """The most at any time, if all of it meets."""
        states = self.states
        kept = states.weights + states.gradients + states.optimizer
        return kept + self.activations + self.working


_CONTEXT_BYTES, _FRAGMENTATION = 2 * 2**30, 0.05


def beside_tensors(total: int) -> int:
    """An estimate of the bytes that a GPU's process takes beside so many bytes of tensors."""
    return _CONTEXT_BYTES + round(_FRAGMENTATION * total)


def rank_memory(
    config: RunConfig, stages: Sequence[ModelStage], schedule: Schedule, timeline: Timeline
) -> list[RankMemory]:
    """Of every pipeline rank of a resolved config, in order; `timeline` is of its schedule."""
    held = [held_by(config, stage) for stage in stages]
    weights = tuple(MicrobatchMemory(h.activations, h.checkpoint, h.deferred) for h in held)
    lines = memory_over_time(schedule, timeline, weights)
    ranks = []
    for rank, line in enumerate(lines):
        mine = schedule.stages_of(rank)
        states = rank_states(config, [stages[s] for s in mine])
        working = max(held[s].working for s in mine) + sum(held[s].messages for s in mine)
        ranks.append(RankMemory(states, round(peak_memory(line)), working))
    return ranks
