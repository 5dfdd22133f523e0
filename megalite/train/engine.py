"""Model chunks, optimizer and pipeline of one rank, built from a config: the step without a loop.

The trainer, the parity tests and the benchmarks build the same object, at every layout. Reads and
writes no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megalite.config import RunConfig
from megalite.distributed.mesh import Mesh
from megalite.distributed.precision import DTYPES, set_tf32
from megalite.errors import ConfigError
from megalite.kernels import Kernels
from megalite.model.init import init_params
from megalite.model.transformer import Transformer
from megalite.optim.distributed_optimizer import DistributedOptimizer, StepResult
from megalite.pipeline.chunk import BoundarySpec
from megalite.pipeline.runtime import PipelineRuntime
from megalite.run.batch_plan import num_micro_batches
from megalite.run.pipeline_schedule import make_schedule
from megalite.run.stages import stages_of
from megalite.tensor_parallel.context import LayerContext
from megalite.tensor_parallel.cross_entropy import LossExtras
from megalite.train.batch import TokenBatch, Upload
from megalite.train.kernel_choice import choose_kernels


class Scorer:
    """One rank's share of the model and the pipeline through it, for losses alone.

    Raises ConfigError for a config that is not resolved (`checks.check_and_resolve`).
    """

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        if config.parallel.dp is None or config.pipeline.schedule is None:
            raise ConfigError(
                f"the config has parallel.dp={config.parallel.dp} and pipeline.schedule="
                f"{config.pipeline.schedule}, but an engine needs both; pass what "
                "megalite.checks.check_and_resolve(config, world_size) returns"
            )
        self.config, self.mesh = config, mesh
        self.dtype = DTYPES[config.train.dtype]
        set_tf32(config.train.tf32, mesh.device)

        self._full = num_micro_batches(config)
        placement = make_schedule(config, self._full).place
        self.ops = choose_kernels(config, mesh.device, self.dtype)
        self.chunks = build_chunks(config, mesh, self.dtype, placement, self.ops)
        self.upload = Upload(mesh.device, self.dtype, config.data.reset_positions)
        tokens = config.train.micro_batch * config.data.seq_length
        if config.parallel.sequence_parallel:
            tokens //= mesh.tp.size
        self._boundary = BoundarySpec((tokens, config.model.hidden_size), self.dtype)
        self._runtimes: dict[int, PipelineRuntime] = {}  # by microbatches of a step

    def _runtime_for(self, count: int) -> PipelineRuntime:
        """The pipeline for a number of microbatches; all ranks make it at the same point."""
        if count not in self._runtimes:
            self._runtimes[count] = PipelineRuntime(
                make_schedule(self.config, count),
                self.chunks,
                self.mesh,
                self._boundary,
                **self._callbacks(),
            )
        return self._runtimes[count]

    def _callbacks(self) -> dict[str, Any]:
        """The runtime's callbacks: losses alone need none."""
        return {}

    @torch.no_grad()
    def forward_only(self, micro_batches: Sequence[TokenBatch]) -> Tensor:
        """This rank's part of the loss of any number of microbatches, float64; no gradients."""
        return self._total(self._runtime_for(self._full).run_forward(micro_batches))

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The weights to evaluate inside the block; all ranks enter it."""
        yield

    def _total(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum of losses on one tp rank, so that a sum over all ranks counts each once."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.tp.rank == 0:
            for loss in losses:
                total += loss
        return total


class Engine(Scorer):
    """A scorer with the optimizer over its model. Raises ConfigError as `Scorer`."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        # After the chunks, whose parameters it moves, and before the pipeline that calls it.
        self.optimizer = DistributedOptimizer(
            self.chunks, mesh, config.optimizer, self.dtype, mesh.device, self.ops
        )
        self.runtime = self._runtime_for(self._full)
        self.z_loss = torch.zeros((), dtype=torch.float64, device=mesh.device)

    def _callbacks(self) -> dict[str, Any]:
        return {
            "on_last_backward_start": self.optimizer.expect_last,
            "on_reduce": self.optimizer.finish_chunk,
        }

    def forward_backward(
        self, micro_batches: Sequence[TokenBatch], *, trace: bool = False
    ) -> Tensor:
        """Compute the gradients of a step; return this rank's part of the loss.

        trace: fills `runtime.trace`. The loss is float64, on the device: the sum of the
        microbatches' losses, in order; 0 on ranks without the last stage. The z-loss is not in it
        but in `z_loss`.
        """
        self.optimizer.begin_step()
        self.runtime = self._runtime_for(len(micro_batches))
        scale = self.optimizer.loss_scale
        loss = self._total(self.runtime.run(micro_batches, loss_scale=scale, trace=trace))
        if self.config.train.z_loss:
            loss, self.z_loss = self._loss_parts()
        return loss

    def _loss_parts(self) -> tuple[Tensor, Tensor]:
        """This rank's parts of the cross entropy and the z-loss of the last step."""
        parts = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for chunk in self.chunks:
            if chunk.last:
                taken = chunk.vocab.take_parts()
                parts += taken if self.mesh.tp.rank == 0 else 0.0
        return parts[0], parts[1]

    def train_step(
        self, micro_batches: Sequence[TokenBatch], lr: float
    ) -> tuple[Tensor, StepResult]:
        """`forward_backward`, then one optimizer step with rate `lr`."""
        loss = self.forward_backward(micro_batches)
        return loss, self.optimizer.step(lr)

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The weights of `eval.weights` inside the block; all ranks enter it."""
        if self.config.eval.weights == "ema":
            with self.optimizer.averaged_weights():
                yield
        else:
            yield


def build_chunks(
    config: RunConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    placement: Sequence[int],
    ops: Kernels | None = None,
) -> list[Transformer]:
    """This pipeline rank's model chunks with their initial weights.

    placement[s] is the pipeline rank of stage s. ops: the kernels, plain torch's by default.
    """
    chunks: list[Transformer] = []
    for stage in stages_of(config, placement):
        if stage.rank != mesh.pp.rank:
            continue

        # A context, and in it a store of gradients, for each chunk: their backwards interleave.
        context = LayerContext(
            mesh.tp,
            dtype,
            mesh.device,
            sequence_parallel=config.parallel.sequence_parallel,
            overlap=config.parallel.overlap_tp,
            ops=ops or Kernels(),
        )
        chunk = Transformer(
            config.model,
            context,
            stage,
            seq_length=config.data.seq_length,
            recompute="none" if config.train.recompute == "stage" else config.train.recompute,
            loss_chunk_tokens=config.train.loss_chunk_tokens,
            extras=LossExtras(config.train.z_loss, config.train.label_smoothing),
            # The first stage is built before the last one, and is the first chunk of its rank.
            embedding_chunk=chunks[0] if stage.tied == "beside" and stage.last else None,
        )
        init_params(chunk.named_params(), config.train.seed, mesh.axis)
        chunks.append(chunk)
    return chunks
