"""A step's microbatches as the model reads them: tokens on the device, weights that sum to 1.

The loss of a step is the sum over its valid tokens divided by their number over the whole global
batch, known before the first microbatch; so neither padding nor accumulation nor layout moves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.config import RunConfig
from megalite.data.batches import Batches, MicroBatch
from megalite.data.loader import Loader
from megalite.distributed import comm
from megalite.distributed.mesh import Mesh
from megalite.distributed.precision import main_grad_dtype
from megalite.kernels.upload import upload
from megalite.model.dropout import DropoutAt
from megalite.model.sequence import Masks
from megalite.run.batch_plan import BatchPlan


@dataclass(frozen=True)
class TokenBatch:
    """A microbatch on the device: token_T, label_T int64 [T]; weight_T [T]; cu_seqlens [0, ..., T].

    dropout: the place of the microbatch in its step; None drops nothing (evaluation). masks: those
    made so far, which the microbatches of a step share. position_T: the place of each token for
    learned positions; None counts through the sequence.
    """

    token_T: Tensor
    label_T: Tensor
    weight_T: Tensor
    cu_seqlens: list[int]
    dropout: DropoutAt | None = None
    masks: Masks = field(default_factory=dict)
    position_T: Tensor | None = None


class Upload:
    """The way of a rank's microbatches to its device.

    On CUDA copies run on a stream of their own: beside what is computed, and before it is done.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, reset_positions: bool = False
    ) -> None:
        self._reset_positions = reset_positions
        self._device, self._weight_dtype = device, main_grad_dtype(dtype)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def token_batches(
        self,
        micro_batches: Sequence[MicroBatch],
        scale: float,
        dropout: DropoutAt | None = None,
    ) -> list[TokenBatch]:
        """The microbatches of a step, each valid token weighing `scale` in the type of the loss.

        dropout: `dropout_start` of a step to train on; None for evaluation, which drops nothing.
        """
        tokens = torch.stack([ids for b in micro_batches for ids in (b.tokens, b.labels)])
        weights = torch.stack([batch.loss_weight for batch in micro_batches]).double() * scale
        positions: Sequence[Tensor | None] = [None] * len(micro_batches)
        if self._reset_positions:
            counted = torch.stack([_positions(batch.cu_seqlens) for batch in micro_batches])
            positions = self._copy(counted).unbind()
        token_2mT, weight_mT = self._copy(tokens), self._copy(weights.to(self._weight_dtype))
        masks: Masks = {}
        return [
            TokenBatch(
                token_T=token_2mT[2 * index],
                label_T=token_2mT[2 * index + 1],
                weight_T=weight_mT[index],
                cu_seqlens=batch.cu_seqlens.tolist(),
                dropout=None if dropout is None else dropout.later(index * len(batch.tokens)),
                masks=masks,
                position_T=positions[index],
            )
            for index, batch in enumerate(micro_batches)
        ]

    def _copy(self, host: Tensor) -> Tensor:
        """`host` on the device, for use on the current stream; the host waits for nothing."""
        if self._stream is None:
            return host
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            there = upload(host, self._device)
        current.wait_stream(self._stream)
        # Its memory is the copying stream's, which would fill it again while this one reads it.
        there.record_stream(current)
        return there


def _positions(cu_seqlens: Tensor) -> Tensor:
    """The place of each token in its segment, int64 [T]."""
    lengths = cu_seqlens.diff()
    place_T = torch.arange(int(cu_seqlens[-1]))
    return place_T - cu_seqlens[:-1].long().repeat_interleave(lengths)


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
