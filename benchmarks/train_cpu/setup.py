"""What the CPU training benchmark trains: sizes, optimizer settings, layouts, tokens.

The same for every contender, so that a row differs from another in nothing but the code that
computes it. Measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megalite.checks import check_and_resolve
from megalite.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from megalite.layout.topology import Topology
from megalite.train.batch import TokenBatch

MODEL = ModelConfig(
    num_layers=8,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=4,
    ffn_hidden_size=688,
    vocab_size=4096,
)
SEQ_LENGTH = 256
GLOBAL_BATCH = 16
STEP_TOKENS = GLOBAL_BATCH * SEQ_LENGTH
OPTIMIZER = OptimizerConfig(lr=3e-4, lr_schedule="constant", clip_grad=1.0)


@dataclass(frozen=True)
class Layout:
    """A megalite layout: one thread in each of tp x pp x dp processes."""

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    zero: Literal[0, 1] = 0

    @property
    def topology(self) -> Topology:
        return Topology(tp=self.tp, pp=self.pp, dp=self.dp)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("serial"),
        Layout("tp2", tp=2),
        Layout("tp2+sp", tp=2, sequence_parallel=True),
        Layout("pp2", pp=2),
        Layout("dp2", dp=2),
        Layout("dp2+zero1", dp=2, zero=1),
        Layout("tp2xpp2", tp=2, pp=2),
        Layout("tp2xdp2", tp=2, dp=2),
    )
}


def config_of(layout: Layout, micro_batch: int) -> RunConfig:
    """Resolved float32 config of a layout; ConfigError if the micro batch does not fit it."""
    config = RunConfig(
        model=MODEL,
        parallel=ParallelConfig(
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            sequence_parallel=layout.sequence_parallel,
        ),
        optimizer=OPTIMIZER.model_copy(update={"zero": layout.zero}),
        data=DataConfig(seq_length=SEQ_LENGTH),
        train=TrainConfig(steps=1, global_batch=GLOBAL_BATCH, micro_batch=micro_batch),
    )
    return check_and_resolve(config, layout.topology.world_size)


def step_tokens(step: int) -> Tensor:
    """Random tokens of a step's global batch, int64 [16, 257]: inputs and, one on, labels."""
    generator = torch.Generator().manual_seed(step)
    shape = (GLOBAL_BATCH, SEQ_LENGTH + 1)
    return torch.randint(0, MODEL.vocab_size, shape, generator=generator)


def rank_batches(step: int, micro_batch: int, dp_rank: int, dp_size: int) -> list[TokenBatch]:
    """A replica's microbatches of a step; the weights of all replicas sum to 1."""
    share = GLOBAL_BATCH // dp_size
    mine = step_tokens(step)[dp_rank * share : (dp_rank + 1) * share]
    return [
        TokenBatch(
            token_T=part[:, :-1].flatten(),
            label_T=part[:, 1:].flatten(),
            weight_T=torch.full((part.shape[0] * SEQ_LENGTH,), 1 / STEP_TOKENS).double(),
            cu_seqlens=list(range(0, part.shape[0] * SEQ_LENGTH + 1, SEQ_LENGTH)),
        )
        for part in torch.split(mine, micro_batch)
    ]
