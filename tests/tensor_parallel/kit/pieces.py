"""Whole tensors by name, a rank's piece of them, and whole gradients from all ranks' pieces."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megalite.distributed import comm
from megalite.layout.sharding import ShardSpec
from megalite.tensor_parallel.context import LayerContext, ShardedModule

# (tp, sequence parallelism)
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def draw(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal values that depend on name and shape only."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def tensor_parallel(ctx: Any, sp: bool, **options: Any) -> LayerContext:
    """The tp axis over all ranks, float64 unless asked otherwise; its ledger starts from zero."""
    mesh = ctx.mesh(tp=ctx.world_size)
    dtype = options.pop("dtype", torch.float64)
    return LayerContext(mesh.tp, dtype, mesh.device, sequence_parallel=sp, **options)


def piece(whole: Tensor, spec: ShardSpec, context: LayerContext) -> Tensor:
    """This rank's part of a whole parameter."""
    size, rank = context.tp.size, context.tp.rank
    starts = spec.local_offsets(size, rank)
    for dim, (start, length) in enumerate(zip(starts, spec.local_shape(size), strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def fill(layer: ShardedModule) -> None:
    """Give each parameter its piece of the values drawn for its name."""
    with torch.no_grad():
        for attribute, spec in layer.specs.items():
            getattr(layer, attribute).copy_(
                piece(draw(spec.name, *spec.shape), spec, layer.context)
            )


def tokens_of(whole: Tensor, context: LayerContext) -> Tensor:
    """This rank's tokens: a slice under sequence parallelism, else all of them."""
    return comm.local_slice(whole, context.tp) if context.sequence_parallel else whole


def transposed(x: Tensor) -> Tensor:
    """The same values, columns next to each other in memory."""
    return x.t().contiguous().t()


@dataclass
class Outcome:
    """One rank's output, input gradient, and gradients of parameters with their specs."""

    output: Tensor
    input_grad: Tensor | None = None
    grads: dict[str, tuple[ShardSpec, Tensor]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def gradients_of(layer: ShardedModule) -> dict[str, tuple[ShardSpec, Tensor]]:
    """What the gradient store holds for each parameter, by attribute; and nothing is in `.grad`."""
    found = {}
    for attribute, spec in layer.specs.items():
        param: nn.Parameter = getattr(layer, attribute)
        assert param.grad is None
        found[attribute] = (spec, layer.context.grads.buffer(param).clone())
    return found


def whole_gradient(outcomes: list[Outcome], attribute: str) -> Tensor:
    """Pieces side by side, partial sums added; where all ranks hold all, their bits must agree."""
    spec = outcomes[0].grads[attribute][0]
    parts = [outcome.grads[attribute][1] for outcome in outcomes]
    if spec.partial:
        return torch.stack(parts).sum(0)
    if spec.cut_dim is None:
        return same_everywhere(parts)
    return torch.cat(parts, dim=spec.cut_dim)


def whole_tokens(parts: list[Tensor], sp: bool) -> Tensor:
    """Token slices one below the other, or what all ranks agree on."""
    return torch.cat(parts) if sp else same_everywhere(parts)


def present(x: Tensor | None) -> Tensor:
    """The tensor, such as a gradient, that must have been computed."""
    assert x is not None
    return x


def same_everywhere(parts: list[Tensor]) -> Tensor:
    for part in parts[1:]:
        assert torch.equal(part, parts[0])
    return parts[0]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest magnitude of `want`; NaN anywhere gives NaN."""
    assert got.shape == want.shape, (got.shape, want.shape)
    want = want.detach().double()
    scale = float(want.abs().max()) or 1.0
    return float((got.detach().double() - want).abs().max()) / scale
