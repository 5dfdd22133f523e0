"""The plan beside peaks that were measured on GPUs, with another framework at the same layouts.

Peaks of torch's allocator for Megatron-Core on eight B200 (MooreThreads/SimuMax, docs/b200, release
v1.2): bfloat16, float32 gradients, distributed optimizer, 4 microbatches of one sequence of 4096
tokens, no recomputation. Megatron keeps some tensors that megalite does not, such as a weight
gradient's stand-in as large as a gate and up projection and float32 logits, so the plan must lie
below each, and not by much where these are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from megalite.checks import check_and_resolve
from megalite.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from megalite.planner import rank_memory
from megalite.run.pipeline_schedule import make_schedule, modelled_durations
from megalite.run.stages import stages_of
from megalite.schedules import simulate

GIB = 2**30
SHAPE_70B = {"num_layers": 12, "hidden_size": 8192, "num_heads": 64, "num_kv_heads": 8,
             "ffn_hidden_size": 28672}  # fmt: skip
SHAPE_405B = {"num_layers": 4, "hidden_size": 16384, "num_heads": 128, "num_kv_heads": 16,
              "ffn_hidden_size": 53248}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """peaks_gib: of a rank of each pipeline rank. most: how far below it the plan may lie."""

    model: dict[str, Any]
    tp: int
    pp: int
    dp: int
    peaks_gib: tuple[float, ...]
    most: float


ROWS = [
    Measured(SHAPE_70B, 1, 2, 4, (66.55, 62.97), 0.055),
    Measured(SHAPE_70B, 2, 1, 4, (60.68,), 0.035),
    Measured(SHAPE_70B, 4, 1, 2, (39.07,), 0.03),
    Measured(SHAPE_70B, 8, 1, 1, (28.29,), 0.025),
    Measured(SHAPE_405B, 1, 2, 4, (86.61, 87.08), 0.115),
    Measured(SHAPE_405B, 2, 1, 4, (81.59,), 0.065),
    Measured(SHAPE_405B, 4, 1, 2, (52.89,), 0.05),
    Measured(SHAPE_405B, 8, 1, 1, (38.57,), 0.04),
]


def planned_gib(row: Measured) -> list[float]:
    config = check_and_resolve(
        RunConfig(
            model=ModelConfig(**row.model, vocab_size=128256),
            parallel=ParallelConfig(tp=row.tp, pp=row.pp, dp=row.dp, sequence_parallel=row.tp > 1),
            pipeline=PipelineConfig(schedule="1f1b"),
            optimizer=OptimizerConfig(lr=1e-4, lr_schedule="constant"),
            data=DataConfig(path="x", tokenizer="x.model", seq_length=4096),
            train=TrainConfig(steps=1, global_batch=4 * row.dp, micro_batch=1, dtype="bfloat16"),
        )
    )
    schedule = make_schedule(config, 4)
    timeline = simulate(schedule, modelled_durations(config))
    ranks = rank_memory(config, stages_of(config, schedule.place), schedule, timeline)
    return [rank.total / GIB for rank in ranks]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.model['hidden_size']}-tp{r.tp}-pp{r.pp}")
def test_planned_peaks_lie_a_little_below_those_of_megatron(row: Measured) -> None:
    planned = planned_gib(row)
    assert len(planned) == len(row.peaks_gib)
    for mine, theirs in zip(planned, row.peaks_gib, strict=True):
        assert (1 - row.most) * theirs < mine < theirs
