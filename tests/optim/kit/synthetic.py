"""A model without a forward: chunks with odd-sized parameters whose gradients are drawn by name.

Every value is a function of (global name, step, sample), so any layout must give what one process
gives. `expected` is that one process: `torch.optim.AdamW` in float64 on whole tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import OptimizerConfig
from megalite.distributed import comm
from megalite.distributed.mesh import Mesh
from megalite.kernels import Kernels
from megalite.layout.sharding import EXPERT, Matrices, ShardSpec
from megalite.optim.distributed_optimizer import DistributedOptimizer, StepResult
from megalite.tensor_parallel.grads import GradStore

NUM_LAYERS = 4
NUM_SAMPLES = 12  # divisible by every dp size used
TIED = ShardSpec("embedding.weight", (10, 7), cut_dim=0, tied=True)
FINAL = ShardSpec("final_norm.weight", (7,), partial=True, decay=False)


def draw(*key: object) -> Callable[[tuple[int, ...]], Tensor]:
    """A float64 tensor that depends on the key only."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def layer_specs(layer: int) -> list[ShardSpec]:
    """Replicated and partial, replicated and whole, sharded by rows and by columns; two uses."""
    name = f"layers.{layer}"
    return [
        ShardSpec(f"{name}.norm", (7,), partial=True, decay=False),
        ShardSpec(f"{name}.up", (6, 5), cut_dim=0, contributions=2, matrices=Matrices()),
        ShardSpec(f"{name}.bias", (11,), decay=False),
        ShardSpec(f"{name}.down", (5, 18), cut_dim=1, matrices=Matrices()),
    ]


def expert_spec(layer: int) -> ShardSpec:
    """A weight of 8 experts, which ep cuts: a gradient that all ranks of a stage have a part in."""
    return ShardSpec(f"layers.{layer}.experts", (8, 3, 5), cut_dim=0, grid=EXPERT, layer=layer)


def stage_sections(stage: int, num_stages: int, experts: bool = False) -> list[list[ShardSpec]]:
    """The embedding, each layer, and the head of one stage; empty where the stage lacks them."""
    first, last = stage == 0, stage == num_stages - 1
    per_stage = NUM_LAYERS // num_stages
    tied = replace(TIED, contributions=2, tied=False) if num_stages == 1 else TIED
    head = [FINAL] if first else [FINAL, replace(tied, counted=False)]
    layers = range(stage * per_stage, (stage + 1) * per_stage)
    return [
        [tied] if first else [],
        *([*layer_specs(n), *([expert_spec(n)] if experts else [])] for n in layers),
        head if last else [],
    ]


def local_part(full: Tensor, spec: ShardSpec, mesh: Mesh) -> Tensor:
    """This rank's block of a whole tensor."""
    axis = mesh.axis(spec.grid.cut_axis)
    starts = spec.local_offsets(axis.size, axis.rank)
    for dim, (start, size) in enumerate(zip(starts, spec.local_shape(axis.size), strict=True)):
        full = full.narrow(dim, start, size)
    return full


def add_to(part: Tensor, buffer: Tensor) -> None:
    buffer.add_(part)


class SyntheticChunk:
    """One stage's parameters, and a backward that adds drawn gradients in reverse use order."""

    def __init__(self, sections: list[list[ShardSpec]], mesh: Mesh, dtype: torch.dtype) -> None:
        self._mesh = mesh
        self.grads = GradStore()
        self.before_section: Callable[[int], None] | None = None
        self._sections = [
            [(nn.Parameter(self._local(draw(s.name)(s.shape), s).to(dtype)), s) for s in section]
            for section in sections
        ]

    def _local(self, full: Tensor, spec: ShardSpec) -> Tensor:
        return local_part(full, spec, self._mesh).clone()

    def named_params(self) -> list[tuple[nn.Parameter, ShardSpec]]:
        return [pair for section in self._sections for pair in section]

    def sections(self) -> list[list[nn.Parameter]]:
        return [[param for param, _ in section] for section in self._sections]

    def forward(self) -> list[Tensor]:
        """Copies of all parameters, each read right after its section's hook."""
        seen: list[Tensor] = []
        for index, section in enumerate(self._sections):
            if self.before_section is not None:
                self.before_section(index)
            seen += [param.detach().clone() for param, _ in section]
        return seen

    def backward(self, step: int, sample: int) -> None:
        """Add every contribution of one sample; the first use's comes last."""
        todo = [
            (param, spec, part)
            for param, spec in reversed(self.named_params())
            for part in self._contributions(spec, step, sample)
        ]
        for param, _, part in todo:
            self.grads.add(param, partial(add_to, part))

    def _contributions(self, spec: ShardSpec, step: int, sample: int) -> Iterator[Tensor]:
        if spec.grid == EXPERT:
            yield self._local(self._expert_tokens(spec, step, sample), spec)
            return
        if spec.name == TIED.name:
            uses = ["in", "out"] if not spec.tied else ["in" if spec.counted else "out"]
            parts = [draw(spec.name, use, step, sample)(spec.shape) for use in uses]
        else:
            whole = draw(spec.name, step, sample)(spec.shape)
            parts = [whole] if spec.contributions == 1 else [whole * 0.25, whole * 0.75]
        for part in parts:
            yield self._partial(part, spec) if spec.partial else self._local(part, spec)

    def _expert_tokens(self, spec: ShardSpec, step: int, sample: int) -> Tensor:
        """The gradient of the tokens that the ranks of this ep group send to its experts.

        Each rank has its own sample, of which tp ranks have a part of the tokens each.
        """
        mesh, share = self._mesh, NUM_SAMPLES // self._mesh.dp_cp.size
        place = sample - mesh.dp_cp.rank * share
        total = torch.zeros(spec.shape, dtype=torch.float64)
        for rank in mesh.ep.ranks:
            at = mesh.topology.coords(rank)
            replica = at.cp + mesh.cp.size * at.dp
            whole = draw(spec.name, step, replica * share + place)(spec.shape)
            total += self._partial(whole, spec, at.tp)
        return total

    def _partial(self, whole: Tensor, spec: ShardSpec, tp_rank: int | None = None) -> Tensor:
        """A tp rank's summand (default: this one's) of a gradient that all of them make up."""
        tp = self._mesh.tp
        shares = [draw("share", spec.name, r)(spec.shape) for r in range(tp.size - 1)]
        last = 1.0 - torch.stack(shares).sum(0) if shares else torch.ones_like(whole)
        return whole * [*shares, last][tp.rank if tp_rank is None else tp_rank]


def make_chunks(
    mesh: Mesh, dtype: torch.dtype, vpp: int = 1, experts: bool = False
) -> list[SyntheticChunk]:
    """This pipeline rank's chunks, chunk c being stage c * pp + pp rank."""
    num_stages = mesh.pp.size * vpp
    stages = [c * mesh.pp.size + mesh.pp.rank for c in range(vpp)]
    return [SyntheticChunk(stage_sections(s, num_stages, experts), mesh, dtype) for s in stages]


def make(
    mesh: Mesh,
    dtype: torch.dtype = torch.float64,
    vpp: int = 1,
    ops: Kernels | None = None,
    experts: bool = False,
    **settings: Any,
) -> tuple[list[SyntheticChunk], DistributedOptimizer]:
    """Chunks and their optimizer, with buckets that hold a few parameters each."""
    chunks = make_chunks(mesh, dtype, vpp, experts)
    config = OptimizerConfig.model_validate({"bucket_mb": 0.0005, **settings})
    return chunks, DistributedOptimizer(chunks, mesh, config, dtype, torch.device("cpu"), ops)


def accumulate(
    chunks: list[SyntheticChunk],
    optimizer: DistributedOptimizer,
    mesh: Mesh,
    step: int,
    poison: dict[str, float] | None = None,
) -> None:
    """Forward and backward of this replica's samples, as a trainer drives them.

    `poison`: a value for the last gradient element of the named parameters of this rank.
    """
    optimizer.begin_step()
    for chunk in chunks:
        for param, spec in chunk.named_params():
            if poison and spec.name in poison:
                chunk.grads.buffer(param).view(-1)[-1] = poison[spec.name]
    share = NUM_SAMPLES // mesh.dp_cp.size
    samples = range(mesh.dp_cp.rank * share, (mesh.dp_cp.rank + 1) * share)
    for sample in samples:
        for chunk in chunks:
            chunk.forward()
        for index, chunk in reversed(list(enumerate(chunks))):
            if sample == samples[-1]:
                optimizer.expect_last(index)
            chunk.backward(step, sample)
            if sample == samples[-1]:
                optimizer.finish_chunk(index)


def train(
    chunks: list[SyntheticChunk],
    optimizer: DistributedOptimizer,
    mesh: Mesh,
    num_steps: int,
    first_step: int = 0,
    lr: float = 0.01,
) -> list[StepResult]:
    """Several whole steps; the results of each."""
    results = []
    for step in range(first_step, first_step + num_steps):
        accumulate(chunks, optimizer, mesh, step)
        results.append(optimizer.step(lr))
    return results


@dataclass
class Expected:
    """What one process gets: whole float64 tensors by name, and the norm of every step."""

    params: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    ema: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)


def expected(
    num_steps: int,
    config: OptimizerConfig,
    lr: float = 0.01,
    rules: Callable[[ShardSpec], tuple[float, float]] | None = None,
    experts: bool = False,
) -> Expected:
    """The same run by torch's own AdamW, without buffers, shards or ranks.

    `rules` gives a parameter's (rate scale, decay); by default decay as its spec says.
    """
    rules = rules or (lambda spec: (1.0, config.weight_decay if spec.decay else 0.0))
    specs = {s.name: s for section in stage_sections(0, 1, experts) for s in section}
    params = {name: nn.Parameter(draw(name)(s.shape)) for name, s in specs.items()}
    groups = [
        {"params": [params[name]], "lr": lr * scale, "weight_decay": decay}
        for name, spec in specs.items()
        for scale, decay in [rules(spec)]
    ]
    adamw = torch.optim.AdamW(
        groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, foreach=False
    )
    norms = []
    average = {name: param.detach().clone() for name, param in params.items()}
    grads: dict[str, Tensor] = {}
    for step in range(num_steps):
        for name in params:
            keys = [(name, "in"), (name, "out")] if name == TIED.name else [(name,)]
            draws = [
                draw(*key, step, sample)(specs[name].shape)
                for key in keys
                for sample in range(NUM_SAMPLES)
            ]
            grads[name] = torch.stack(draws).sum(0)
        norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt().item()
        norms.append(norm)
        if config.clip_grad is not None and norm + 1e-6 > config.clip_grad:
            for grad in grads.values():
                grad *= config.clip_grad / (norm + 1e-6)
        for name, param in params.items():
            param.grad = grads[name]
        adamw.step()
        for name, param in params.items():
            left = config.ema_decay or 0.0
            average[name] = left * average[name] + (1 - left) * param.detach()
    return Expected(
        params={name: param.detach() for name, param in params.items()},
        exp_avg={name: adamw.state[param]["exp_avg"] for name, param in params.items()},
        exp_avg_sq={name: adamw.state[param]["exp_avg_sq"] for name, param in params.items()},
        ema=average,
        norms=norms,
    )


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest wanted value."""
    return float((got.double() - want).abs().max() / want.abs().max())


def worst_error(
    chunks: list[SyntheticChunk], optimizer: DistributedOptimizer, mesh: Mesh, want: Expected
) -> float:
    """Largest relative error of this rank's parameters and of the state it holds."""
    optimizer.wait_params()
    errors = [
        relative_error(param.detach(), local_part(want.params[spec.name], spec, mesh))
        for chunk in chunks
        for param, spec in chunk.named_params()
    ]
    kinds = {
        "param": want.params,
        "exp_avg": want.exp_avg,
        "exp_avg_sq": want.exp_avg_sq,
        "ema": want.ema,
    }
    for state in optimizer.named_state():
        whole = local_part(kinds[state.kind][state.spec.name], state.spec, mesh).reshape(-1)
        part = whole[state.start : state.stop]
        errors.append(float((state.tensor - part).abs().max() / whole.abs().max()))
    return max(errors)


def _rows_equal(x: Tensor, axis: Any) -> bool:
    rows = comm.all_gather(x.detach().reshape(1, -1).clone(), axis)
    return all(torch.equal(row, rows[0]) for row in rows)


def differing_replicas(chunks: list[SyntheticChunk], mesh: Mesh) -> list[str]:
    """Parameters whose copies on other ranks are not the same bits: over dp_cp, tp and stages."""
    differing: list[str] = []
    for chunk in chunks:
        for param, spec in chunk.named_params():
            axes = [mesh.axis(spec.grid.replica_axis)]
            axes += [mesh.axis(spec.grid.cut_axis)] if spec.cut_dim is None else []
            axes += [mesh.embedding] if spec.tied else []
            equal = [_rows_equal(param, axis) for axis in axes]
            differing += [] if all(equal) else [spec.name]
    return differing
