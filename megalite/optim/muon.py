"""Muon: momentum, orthogonalised, for hidden matrices (K. Jordan et al., 2024).

For a matrix W [r, c] with gradient G and momentum M, at rate lr:

    M <- mu * M + (1 - mu) * G            U = mu * M + (1 - mu) * G  (Nesterov), else M
    W <- W * (1 - lr * weight_decay) - lr * scale(r, c) * orthogonalise(U)

`orthogonalise` is a quintic Newton-Schulz iteration that moves all singular values near 1. `scale`
is 0.2 * sqrt(max(r, c)), which gives updates the size of AdamW's, so that both share one rate and
one decay ("Muon is Scalable for LLM Training", arXiv 2502.16982), or sqrt(max(1, r / c)) (Jordan).

`spec.matrices` are the matrices of a weight, in global terms: a packed projection is taken apart
into query, key and value, or gate and up. The matrix is always the whole one: under tensor
parallelism its shards are gathered on the tp rank with the least work so far, and the result is
sent back. Over dp_cp a bucket is spread so that each rank owns whole (tp-local) matrices, so
nothing is sent for that. No layout changes what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.distributed.comm import all_to_all
from megalite.distributed.mesh import Axis
from megalite.kernels import Kernels
from megalite.layout.bucket_plan import assign
from megalite.layout.sharding import DENSE
from megalite.optim.shard import BucketShard, Piece

# Jordan's coefficients: steep at 0, so that five steps lift small singular values, at the price of
# leaving them between 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Block:
    """One matrix of one weight; `local` is this tp rank's part, a view of the direction to take."""

    local: Tensor
    cut_dim: int | None
    num_parts: int  # tp parts that make up the matrix: 1 where every tp rank holds all of it

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        columns = self.local.shape[-1]
        if self.cut_dim == self.local.dim() - 1:
            columns *= self.num_parts
        return self.local.numel() * self.num_parts // columns, columns

    @property
    def cost(self) -> int:
        """Relative cost of orthogonalising the matrix: rows x columns x the smaller of both."""
        rows, columns = self.shape
        return rows * columns * min(rows, columns)

    def join(self, parts: Tensor) -> Tensor:
        """All tp ranks' parts, [num_parts, elements], as the matrix [rows, columns]."""
        shaped = parts.view(self.num_parts, *self.local.shape)
        whole = shaped[0] if self.cut_dim is None else torch.cat([*shaped], self.cut_dim)
        return whole.reshape(self.shape)

    def split(self, matrix: Tensor) -> Tensor:
        """All tp ranks' parts of a matrix, [num_parts, elements]: the reverse of `join`."""
        if self.cut_dim is None:
            return matrix.reshape(1, -1)
        sizes = list(self.local.shape)
        sizes[self.cut_dim] *= self.num_parts
        parts = matrix.view(sizes).chunk(self.num_parts, self.cut_dim)
        return torch.stack([part.reshape(-1) for part in parts])


@torch.no_grad()
def muon_update(
    shards: Sequence[BucketShard], tp: Axis, config: OptimizerConfig, lr: float
) -> None:
    """Update the matrices of all whole buckets in place; all ranks of a tp group call it alike."""
    for shard in shards:
        if shard.bucket.whole:
            # All matrices of a bucket at once: two exchanges over tp, however many there are.
            pieces = [piece for piece in shard.pieces() if piece.slot.param.requires_grad]
            directions = [_direction(piece, config) for piece in pieces]
            blocks = [
                block
                for piece, direction in zip(pieces, directions, strict=True)
                for block in blocks_of(piece, direction, tp.size)
            ]
            _orthogonalise_all(blocks, tp, config)

            for piece, direction in zip(pieces, directions, strict=True):
                rule = piece.slot.rule
                rate = lr * rule.lr_scale
                piece.weight.mul_(1 - rate * rule.weight_decay).sub_(direction, alpha=rate)


def orthogonalise(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz: singular values near 1, singular vectors kept; computed in `dtype`.

    x <- a x + (b A + c A^2) x with A = x x^T, from x = matrix / |matrix|, on the smaller side.
    """
    a, b, c = _COEFFICIENTS
    rows, columns = matrix.shape
    x = matrix.t() if rows > columns else matrix
    tiny = torch.finfo(matrix.dtype).tiny

    # First by a power of two, which changes no bit, so that no square in the norm is 0 or inf.
    largest = torch.linalg.vector_norm(x, math.inf).clamp_min(tiny)
    x = x / (largest / torch.frexp(largest).mantissa)
    x = (x / torch.linalg.vector_norm(x).clamp_min(tiny)).to(dtype)
    for _ in range(steps):
        gram = Kernels.linear(x, x)
        slope = b * gram + c * Kernels.linear(gram, gram)  # gram is symmetric
        x = a * x + Kernels.linear_input_grad(slope, x)
    x = x.to(matrix.dtype)
    return x.t() if rows > columns else x


def update_scale(rows: int, columns: int, rule: str) -> float:
    """Factor of an orthogonalised update; `rule`: "adamw_rms" (arXiv 2502.16982) or "spectral"."""
    if rule == "adamw_rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def blocks_of(piece: Piece, direction: Tensor, tp_size: int) -> list[Block]:
    """The matrices of one weight, as views of its flat, tp-local `direction`."""
    spec, cut = piece.spec, piece.spec.matrices
    assert cut is not None, f"{spec.name} is no hidden matrix"
    local = direction.view(spec.local_shape(tp_size))
    parts = torch.split(local, list(cut.sizes), cut.dim) if cut.sizes else (local,)
    assert spec.grid == DENSE, f"{spec.name}: matrices are brought together over tp alone"
    num_parts = 1 if spec.cut_dim is None else tp_size
    return [Block(part, spec.cut_dim, num_parts) for part in parts]


def _direction(piece: Piece, config: OptimizerConfig) -> Tensor:
    """Update the momentum and return the matrix U to be orthogonalised, a new tensor."""
    assert (piece.start, piece.stop) == (0, piece.slot.param.numel()), "a matrix was cut"
    stored, weight = piece.states["momentum"], 1 - config.muon_momentum
    momentum = stored.to(piece.grad.dtype).lerp_(piece.grad, weight)
    if momentum is not stored:
        stored.copy_(momentum)
    if config.muon_nesterov:
        return torch.lerp(momentum, piece.grad, weight)
    return momentum.clone() if momentum is stored else momentum


def _orthogonalise_all(blocks: Sequence[Block], tp: Axis, config: OptimizerConfig) -> None:
    """Replace every block by its part of the scaled, orthogonalised matrix.

    A matrix that tp cuts is computed on one tp rank; one that all hold, on all of them alike.
    """
    cut = [block for block in blocks if block.num_parts > 1]
    for block in blocks:
        if block.num_parts == 1:
            _store(block, _solve(block, block.local.reshape(1, -1), config)[0])
    if not cut:
        return

    # Every tp rank computes the same assignment, so that sizes need not be exchanged.
    owner_of = assign([block.cost for block in cut], tp.size)
    by_owner = [
        [block for block, owner in zip(cut, owner_of, strict=True) if owner == rank]
        for rank in range(tp.size)
    ]
    mine, in_order = by_owner[tp.rank], [block for owned in by_owner for block in owned]
    sizes = [sum(block.local.numel() for block in owned) for owned in by_owner]
    own_sizes = [sizes[tp.rank]] * tp.size  # each rank has an equal part of my matrices

    # To the owners: the parts lie in the order of their owners, so that each receives one range.
    sent = torch.cat([block.local.reshape(-1) for block in in_order])
    received = all_to_all(sent, tp, sizes, own_sizes).view(tp.size, -1)
    shards = torch.split(received, [block.local.numel() for block in mine], dim=1)
    solved = [_solve(block, shard, config) for block, shard in zip(mine, shards, strict=True)]

    # And back to where the parts came from.
    returned = torch.cat(solved, dim=1).view(-1) if solved else sent.new_empty(0)
    results = all_to_all(returned, tp, own_sizes, sizes)
    values = torch.split(results, [block.local.numel() for block in in_order])
    for block, value in zip(in_order, values, strict=True):
        _store(block, value)


def _solve(block: Block, parts: Tensor, config: OptimizerConfig) -> Tensor:
    """All parts of the scaled, orthogonalised matrix, from all `parts`: [num_parts, elements]."""
    matrix = block.join(parts)
    narrow = config.muon_dtype == "bfloat16" and matrix.dtype == torch.float32
    dtype = torch.bfloat16 if narrow else matrix.dtype
    solution = orthogonalise(matrix, config.muon_steps, dtype)
    solution.mul_(update_scale(*block.shape, config.muon_scale))
    return block.split(solution.contiguous())


def _store(block: Block, values: Tensor) -> None:
    block.local.copy_(values.view(block.local.shape))
