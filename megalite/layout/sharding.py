"""How one parameter lies over the ranks: the single value that gradient reduction, norm counting,
ZeRO, checkpoints and weight exchange all read. Pure arithmetic; knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Matrices:
    """A hidden weight as the matrices it is made of, whatever tensor parallelism cuts.

    The global tensor is cut along `dim` into parts of `sizes` (empty: one part); each part, all its
    dims but the last flattened, is a matrix [rows, last dim].
    """

    dim: int = 0
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardSpec:
    """Global identity of a parameter and how tensor parallelism cuts it.

    `shape` is the global shape. With `shard_dim` set, tp rank r holds the r-th of tp equal blocks
    along that dim; otherwise every tp rank holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None = None
    partial: bool = False  # each tp rank's gradient is a partial sum (sequence parallelism)
    decay: bool = True  # weight decay applies
    shared: bool = False  # tied embedding that another pipeline stage holds too
    copy: bool = False  # the one of two tied copies that norms and checkpoints do not count
    uses: int = 1  # gradient contributions per microbatch
    matrices: Matrices | None = None  # None: no hidden matrix (1-D, embedding, head)

    def __post_init__(self) -> None:
        cut = self.matrices
        if cut is not None and cut.sizes:
            fits = sum(cut.sizes) == self.shape[cut.dim] and cut.dim < len(self.shape) - 1
            assert fits, f"{self.name}: {cut} does not cut {self.shape}"
            assert cut.dim != self.shard_dim, f"{self.name}: tp and matrices cut the same dim"

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of one tp rank's piece; `tp` must divide the sharded dim."""
        if self.shard_dim is None:
            return self.shape
        size = self.shape[self.shard_dim]
        assert size % tp == 0, f"{self.name}: tp={tp} does not divide {size}"
        dim = self.shard_dim
        return (*self.shape[:dim], size // tp, *self.shape[dim + 1 :])

    def local_offsets(self, tp: int, tp_rank: int) -> tuple[int, ...]:
        """Where tp rank `tp_rank`'s piece starts in the global tensor, one offset per dim."""
        if self.shard_dim is None:
            return (0,) * len(self.shape)
        block = self.shape[self.shard_dim] // tp
        return tuple(block * tp_rank if d == self.shard_dim else 0 for d in range(len(self.shape)))
