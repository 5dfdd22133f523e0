"""The distributed optimizer: gradients reduced, and state sharded, over replicas (ZeRO-1).

`DistributedOptimizer.step` is the order of everything after backward:

    dp reduction -> sum over tp of partial gradients -> sum of tied weights over embedding
    -> global norm -> non-finite policy -> unscale and clip -> AdamW, Muon -> average
    -> masters to parameters -> gather

Everything after the dp reduction touches only this rank's part. `zero=0` is the same code with
one shard, all-reduce in place of reduce-scatter, and no gather. AdamW and the sums of squares are
kernels: one pass may unscale, clip, update and write the parameters, and gradients in memory then
stay without the factor, unless `named_grads` asks for them. The learning rate is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.distributed import comm
from megalite.distributed.mesh import Axis, Mesh
from megalite.distributed.precision import main_grad_dtype
from megalite.kernels import Kernels
from megalite.kernels.adamw_operations import AdamWSettings
from megalite.optim.buffers import ChunkBuffers, OptimizerChunk
from megalite.optim.grad_reduce import GradReducer
from megalite.optim.groups import require_matches
from megalite.optim.loss_scale import LossScaler
from megalite.optim.muon import muon_update
from megalite.optim.non_finite import SkipPolicy
from megalite.optim.norm import clip_coefficient, global_norm
from megalite.optim.param_gather import ParamGather
from megalite.optim.shard import EMA, BucketShard, ChunkShard
from megalite.optim.state_tensors import (
    MemoryReport,
    StateTensor,
    memory_report,
    owns,
    state_tensors,
)


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on every rank. `grad_norm`: the norm *before* clipping."""

    grad_norm: float
    clip_coefficient: float
    skipped: bool
    usable: bool  # gradients are finite, and small enough for the moments
    num_bad_ranks: int  # ranks with inf or nan among their gradients
    num_updates: int  # updates applied so far: AdamW's t
    loss_scale: float = 1.0  # of this step's gradients


class DistributedOptimizer:
    """Owns the memory of all parameters and gradients of this rank's chunks, and updates them.

    Call `begin_step`, then for each chunk `expect_last` before and `finish_chunk` after its last
    backward, then `step`. Parameters may be read after `wait_params`, or section by section in
    forward: each chunk's `before_section` hook is set to `wait_section`.

    ops: the kernels to use, plain torch's by default. Raises ConfigError on every rank if a group
    of `config.groups` matches no parameter.
    """

    def __init__(
        self,
        chunks: Sequence[OptimizerChunk],
        mesh: Mesh,
        config: OptimizerConfig,
        dtype: torch.dtype,
        device: torch.device,
        ops: Kernels | None = None,
    ) -> None:
        self._mesh, self._config, self._device, self._dtype = mesh, config, device, dtype
        self._ops = ops or Kernels()
        self._num_updates = 0
        self._scaler = LossScaler(config, enabled=dtype == torch.float16)
        self._skips = SkipPolicy(config, self._scaler)
        names = [spec.name for chunk in chunks for _, spec in chunk.named_params()]
        assert len(set(names)) == len(names), "a parameter is on this rank twice"
        require_matches(config.groups, names, mesh.world, device)

        # Memory first: parameters move into the flat buffers, of which everything else is views.
        self._buffers = [ChunkBuffers(chunk, dtype, device, config, mesh) for chunk in chunks]
        self._shards = [ChunkShard(buffers, config) for buffers in self._buffers]

        # Communication: gradients are reduced before the update, parameters gathered after it, and
        # each forward waits for the parameters of a section ahead of its first use.
        pairs = list(zip(chunks, self._buffers, strict=True))
        self._reducers = [GradReducer(chunk, buffers, config) for chunk, buffers in pairs]
        self._gathers = [ParamGather(chunk, buffers) for chunk, buffers in pairs]
        for index, chunk in enumerate(chunks):
            chunk.before_section = partial(self.wait_section, index)

        # The update: Muon has the whole buckets; AdamW has all others, in as few runs as possible.
        self._bucket_shards = [s for chunk_shard in self._shards for s in chunk_shard.shards]
        self._pieces = [piece for shard in self._bucket_shards for piece in shard.pieces()]
        self._runs = [run for shard in self._bucket_shards for run in shard.runs()]
        settings = AdamWSettings(config.beta1, config.beta2, config.eps)
        self._adamw = self._ops.adamw_plan(self._runs, settings)
        # Clip coefficient / loss scale, where AdamW's gradients in memory still lack it.
        self._missing_factor = 1.0
        self._counted, self._uncounted = self._split_counted()

    @property
    def num_updates(self) -> int:
        """Updates applied so far; skipped steps do not count."""
        return self._num_updates

    @property
    def loss_scale(self) -> float:
        """The factor of the loss's gradient in the next backward; 1 but for float16."""
        return self._scaler.scale

    def begin_step(self) -> None:
        """Zero all gradients."""
        self._missing_factor = 1.0
        for reducer in self._reducers:
            reducer.begin()

    def expect_last(self, chunk_index: int) -> None:
        """The chunk's contributions from now on are its last of the step: reduce as they fill."""
        self._reducers[chunk_index].expect_last()

    def finish_chunk(self, chunk_index: int) -> None:
        """All contributions of the chunk are in: start the reductions that have not started."""
        self._reducers[chunk_index].finish()

    def step(self, lr: float, *, skip_update: bool = False) -> StepResult:
        """Reduce, unscale, clip and apply one update with rate `lr`.

        skip_update: reduce and measure gradients, but leave them, weights and state as they are.

        Raises NonFiniteGradientError, on every rank alike and with all state untouched, when
        gradients are unusable and `non_finite` is "stop", or "skip" skipped `max_skips` already.
        """
        for reducer in self._reducers:
            reducer.wait()
        self.wait_params()

        # A gradient counts in the norm as a sum over all ranks, so partial ones are summed first.
        self._sum_partial()
        self._sum_tied()
        norm = global_norm(
            self._counted, self._uncounted, self._mesh.world, self._device, self._ops
        )

        # All ranks have the same norm, so they decide alike, before any weight or state is written.
        scale = self._scaler.scale  # the scale of these gradients; the policy may change it
        coefficient = clip_coefficient(norm.value / scale, self._config.clip_grad)
        usable = norm.fits(coefficient / scale, main_grad_dtype(self._dtype))
        if not usable:
            self._skips.skip_or_stop(norm, self._num_updates, self._pieces)
        else:
            self._skips.good_step()
        if usable and not skip_update:
            self._update(lr, coefficient / scale)
        return StepResult(
            grad_norm=norm.value / scale,
            clip_coefficient=coefficient,
            skipped=skip_update or not usable,
            usable=usable,
            num_bad_ranks=norm.num_bad_ranks,
            num_updates=self._num_updates,
            loss_scale=scale,
        )

    def wait_section(self, chunk_index: int, section: int) -> None:
        """Wait until the parameters of one section of a chunk hold the last update."""
        self._gathers[chunk_index].wait_section(section)

    def wait_params(self) -> None:
        """Wait until all parameters hold the last update."""
        for gather in self._gathers:
            gather.wait()

    def named_state(self) -> list[StateTensor]:
        """This rank's state, as live views; see `StateTensor` for what to save and load.

        Waits for parameters, so that nothing else is writing while the views are used.
        """
        self.wait_params()
        return state_tensors(self._pieces, self._mesh, self._config.zero)

    def named_grads(self) -> list[StateTensor]:
        """Main gradients of this rank's part, as live views: reduced and clipped after `step`.

        Call it again after each step: only the call applies a factor that they still lack.
        """
        adamw = [shard for shard in self._bucket_shards if not shard.bucket.whole]
        _multiply(adamw, self._missing_factor)
        self._missing_factor = 1.0
        return [
            StateTensor(
                "grad",
                p.spec,
                p.start,
                p.stop,
                p.grad,
                owns(p.spec, self._mesh, self._config.zero),
            )
            for p in self._pieces
        ]

    def scalars(self) -> dict[str, float]:
        """State that is not a tensor, the same on every rank."""
        return {"num_updates": self._num_updates, **self._skips.state(), **self._scaler.state()}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Restore the state that `scalars` returned."""
        self._num_updates = int(scalars["num_updates"])
        self._skips.load(scalars)
        self._scaler.load(scalars)

    def after_load(self) -> None:
        """Bring parameters in line after state was copied into the `named_state` views."""
        self._publish(wait=True)

    def after_weights_load(self) -> None:
        """Bring parameters and averages in line after only the `param` states were loaded."""
        for shard in self._shards:
            shard.reset_averages()
        self._publish(wait=True)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The average of the weights in place of the weights, for forwards inside the block.

        Needs `ema_decay`. Afterwards parameters are the same bits as before.
        """
        self.wait_params()
        shards = self._bucket_shards
        # Masters keep the weights; without masters the parameters are the only copy.
        weights = [s.param.clone() if s.weight is s.param else s.weight for s in shards]
        self._set_params([shard.states[EMA] for shard in shards])
        try:
            yield
        finally:
            self._set_params(weights)

    @torch.no_grad()
    def _set_params(self, values: Sequence[Tensor]) -> None:
        """Write the owned part of each bucket's parameters, and gather all of them."""
        for shard, value in zip(self._bucket_shards, values, strict=True):
            shard.param.copy_(value)
        self._gather(wait=True)

    def memory_report(self) -> MemoryReport:
        """Bytes of this rank's parameters, gradients and state, counted from the tensors."""
        return memory_report(self._buffers, self._shards)

    def _split_counted(self) -> tuple[list[Tensor], list[Tensor]]:
        """Gradient ranges that this rank adds to the norm, and those that another rank adds."""
        counted: list[Tensor] = []
        others: list[Tensor] = []
        for shard in self._bucket_shards:
            for i, j, mine in shard.split(lambda s: owns(s.spec, self._mesh, self._config.zero)):
                (counted if mine else others).append(shard.grad[i:j])
        return counted, others

    @torch.no_grad()
    def _sum_partial(self) -> None:
        """Complete the gradients of which each tp rank holds a part, in one packed all-reduce."""
        grads = [piece.grad for piece in self._pieces if piece.spec.partial]
        _packed_all_reduce(grads, self._mesh.tp)

    @torch.no_grad()
    def _sum_tied(self) -> None:
        """Give both copies of a tied weight the sum of their gradients, in place."""
        for shard in self._bucket_shards:
            if shard.bucket.tied:
                comm.all_reduce(shard.grad, self._mesh.embedding)

    @torch.no_grad()
    def _update(self, lr: float, factor: float) -> None:
        """Multiply gradients by `factor` and apply them."""
        now = self._bucket_shards
        if self._adamw.takes_factor:
            self._missing_factor, now = factor, [shard for shard in now if shard.bucket.whole]
        _multiply(now, factor)
        self._num_updates += 1
        self._adamw.update(lr, self._num_updates, self._missing_factor)
        muon_update(self._bucket_shards, self._mesh.tp, self._config, lr)
        if self._config.ema_decay is not None:
            for shard in self._bucket_shards:
                shard.states[EMA].lerp_(shard.weight, 1.0 - self._config.ema_decay)
        wait = not self._config.overlap_param_gather
        self._publish(wait, adamw_wrote=self._adamw.writes_low)

    def _publish(self, wait: bool, adamw_wrote: bool = False) -> None:
        """Write parameters from masters and gather them.

        adamw_wrote: the kernel wrote the parameters of AdamW's buckets already; Muon's are left.
        """
        for shard in self._shards:
            shard.params_from_masters(whole_only=adamw_wrote)
        self._gather(wait)

    def _gather(self, wait: bool) -> None:
        """Start the gather of all parameters under ZeRO-1, and wait for it if `wait`."""
        if self._config.zero == 1:
            for gather in self._gathers:
                gather.launch()
            if wait:
                self.wait_params()


@torch.no_grad()
def _multiply(shards: Sequence[BucketShard], factor: float) -> None:
    """Multiply the gradients of shards in memory."""
    if factor != 1.0:
        for shard in shards:
            shard.grad.mul_(factor)


def _packed_all_reduce(tensors: Sequence[Tensor], axis: Axis) -> None:
    """Sum 1-D tensors over `axis` in place, with one collective; none when there is nothing."""
    if not tensors or axis.size == 1:
        return
    packed = torch.cat(list(tensors))
    comm.all_reduce(packed, axis)
    totals = torch.split(packed, [tensor.numel() for tensor in tensors])
    for tensor, total in zip(tensors, totals, strict=True):
        tensor.copy_(total)
