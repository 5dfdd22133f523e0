"""A step's microbatches as the model reads them: tokens on the device, weights that sum to 1.

The loss of a step is the sum over its valid tokens divided by their number over the whole global
batch, known before the first microbatch; so neither padding nor accumulation nor layout moves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config import RunConfig
from megalite.data.batches import Batches, MicroBatch
from megalite.data.loader import Loader
from megalite.distributed import comm
from megalite.distributed.mesh import Mesh
from megalite.model.dropout import DropoutAt
from megalite.run.batch_plan import BatchPlan


@dataclass(frozen=True)
class TokenBatch:
    """A microbatch on the device: token_T, label_T int64 [T]; weight_T [T]; cu_seqlens [0, ..., T].

    dropout: the place of the microbatch in its step; None drops nothing (evaluation).
    """

    token_T: Tensor
    label_T: Tensor
    weight_T: Tensor
    cu_seqlens: list[int]
    dropout: DropoutAt | None = None


def step_loader(
    batches: Batches, plan: BatchPlan, stop: int, config: RunConfig, mesh: Mesh
) -> Loader[list[MicroBatch]]:
    """Reads this rank's microbatches of the plan's steps below `stop`, in order, ahead of use.

    They are the same on all ranks of a replica.
    """
    micro_batch, dp = config.train.micro_batch, mesh.dp

    def read(step: int) -> list[MicroBatch]:
        first, batch = plan.first_sample(step), plan.global_batch(step)
        return batches.rank_batches(first, batch, micro_batch, dp.rank, dp.size)

    return Loader(read, stop=stop, workers=config.data.workers, prefetch=config.data.prefetch)


def count_valid_tokens(micro_batches: Sequence[MicroBatch], mesh: Mesh) -> int:
    """The number of labels in the global batch whose loss counts; all ranks call it.

    One rank of each replica counts, and the sum is over the edge: on the axis of the replicas it
    would queue behind the gather of the parameters.
    """
    counts = mesh.tp.rank == mesh.cp.rank == mesh.pp.rank == 0
    mine = sum(int(batch.loss_weight.count_nonzero()) for batch in micro_batches) if counts else 0
    total = torch.tensor(mine, dtype=torch.int64, device=mesh.device)
    comm.all_reduce(total, mesh.edge)
    return int(total)


def dropout_start(
    seed: int, step: int, micro_batches: Sequence[MicroBatch], mesh: Mesh
) -> DropoutAt:
    """The place of this rank's first microbatch in the step's global batch."""
    rank_tokens = sum(len(batch.tokens) for batch in micro_batches)  # equal on all dp ranks
    return DropoutAt(seed, step, mesh.dp.rank * rank_tokens)


def token_batches(
    micro_batches: Sequence[MicroBatch],
    scale: float,
    device: torch.device,
    dropout: DropoutAt | None = None,
) -> list[TokenBatch]:
    """Microbatches on `device`, each valid token weighing `scale`.

    dropout: `dropout_start` of a step to train on; None for evaluation, which drops nothing.
    """
    return [
        TokenBatch(
            token_T=batch.tokens.to(device),
            label_T=batch.labels.to(device),
            weight_T=(batch.loss_weight.double() * scale).to(device),
            cu_seqlens=batch.cu_seqlens.tolist(),
            dropout=None if dropout is None else dropout.later(index * len(batch.tokens)),
        )
        for index, batch in enumerate(micro_batches)
    ]
