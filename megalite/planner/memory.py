"""Bytes of each pipeline rank over a step: its states, and the activations of its schedule.

All ranks with one pipeline coordinate are alike: tensor parallelism cuts evenly, and so does ZeRO.
Only tensors are counted. `beside_tensors` estimates what else a GPU's process takes: CUDA's context
and libraries and the buffers of communicators (1 to 3 GiB in published runs), and memory that the
allocator has but cannot use (2 to 9 % of the tensors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config import RunConfig
from megalite.planner.activations import microbatch_bytes
from megalite.planner.states import States, rank_states
from megalite.run.parameters import ModelStage
from megalite.schedules import Schedule, Timeline
from megalite.schedules.memory import MicrobatchMemory, memory_over_time, peak_memory


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    activations: the most that its schedule holds at once, with the inputs of weight gradients that
    are deferred. working: the most that a backward, messages and gradients on their way take beside
    them.
    """

    states: States
    activations: int
    working: int

    @property
    def total(self) -> int:
        """An upper bound on the bytes at any time: the sum of all parts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what takes them."""
        states = self.states
        return {
            "weights": states.weights,
            "gradients": states.gradients,
            "optimizer": states.optimizer,
            "activations": self.activations,
            "working": self.working,
        }


_CONTEXT_BYTES, _FRAGMENTATION = 2 * 2**30, 0.05


def beside_tensors(total: int) -> int:
    """An estimate of the bytes that a GPU's process takes beside `total` bytes of tensors."""
    return _CONTEXT_BYTES + round(_FRAGMENTATION * total)


def rank_memory(
    config: RunConfig, stages: Sequence[ModelStage], schedule: Schedule, timeline: Timeline
) -> list[RankMemory]:
    """The memory of every pipeline rank, in order.

    The config must be resolved, `schedule` be its schedule and `timeline` the schedule's.
    """
    by_stage = [microbatch_bytes(config, stage) for stage in stages]
    kept = tuple(MicrobatchMemory(b.activations, b.checkpoint, b.deferred) for b in by_stage)
    ranks = []
    for rank, activations in enumerate(memory_over_time(schedule, timeline, kept)):
        mine = schedule.stages_of(rank)
        states = rank_states(config, [stages[s] for s in mine])

        # Only one backward runs at a time, but messages of all chunks may be in flight.
        working = max(by_stage[s].working for s in mine) + sum(by_stage[s].messages for s in mine)
        working += states.sent
        ranks.append(RankMemory(states, round(peak_memory(activations)), working))
    return ranks
