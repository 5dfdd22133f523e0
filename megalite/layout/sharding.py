"""The spec of one parameter: its identity, and its cut over the ranks.

Layers, initial values, gradient reduction, norms, ZeRO, checkpoints and statistics all read this
one value. Pure arithmetic, independent of tensors. `run/parameters.py` lists the specs of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalite.layout.topology import Kind

# The part of the model that a parameter belongs to, by which parameters are counted.
Role = Literal["embedding", "positions", "qkv", "attention_out", "mlp", "norm", "bias", "head"]


@dataclass(frozen=True)
class Grid:
    """The two axes over which the ranks of a pipeline stage share a parameter.

    The ranks of a group of `cut_axis` hold the blocks of a parameter that is cut. Those of
    `replica_axis` hold the same block: its gradient is summed over them, and ZeRO spreads its
    optimizer state over them.
    """

    name: str
    cut_axis: Kind
    replica_axis: Kind


DENSE = Grid("dense", "tp", "dp_cp")
EXPERT = Grid("expert", "ep", "edp")


@dataclass(frozen=True)
class Init:
    """Initial values: normal(0, std), or all `value` where std is 0."""

    std: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class Matrices:
    """A hidden weight as matrices, which tensor parallelism may cut anywhere.

    The global tensor is cut along `dim` into parts of `sizes` (empty: one part); each part, all its
    dims but the last flattened, is a matrix [rows, last dim].
    """

    dim: int = 0
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardSpec:
    """A parameter's identity, its initial values, and its cut.

    `shape` is the global shape. With `cut_dim` set, rank r of the grid's cut axis holds the r-th of
    equal blocks along that dim; otherwise every rank of that axis holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    cut_dim: int | None = None
    grid: Grid = DENSE
    role: Role = "mlp"
    layer: int | None = None  # global index; None outside of the layers
    init: Init = Init()
    num_true_rows: int | None = None  # rows from here on pad a vocabulary, and start as 0
    partial: bool = False  # each tp rank's gradient is a part of the sum over tp
    decay: bool = True  # weight decay applies
    tied: bool = False  # another pipeline stage holds a copy; gradients are summed over both
    counted: bool = True  # False for the second copy, which norms and checkpoints leave out
    contributions: int = 1  # to its gradient, per microbatch
    matrices: Matrices | None = None  # None: no hidden matrix (1-D, embedding, head)

    def __post_init__(self) -> None:
        cut = self.matrices
        if cut is not None and cut.sizes:
            fits = sum(cut.sizes) == self.shape[cut.dim] and cut.dim < len(self.shape) - 1
            assert fits, f"{self.name}: {cut} does not cut {self.shape}"
            assert cut.dim != self.cut_dim, f"{self.name}: ranks and matrices cut the same dim"

    @property
    def group(self) -> str:
        """The group of statistics: embedding, layers.N, norms or head."""
        if self.role == "norm":
            return "norms"
        if self.layer is not None:
            return f"layers.{self.layer}"
        return "embedding" if self.role == "positions" else self.role

    def local_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one block of `num_blocks`, the size of the grid's cut axis."""
        if self.cut_dim is None:
            return self.shape
        dim, size = self.cut_dim, self.shape[self.cut_dim]
        assert size % num_blocks == 0, (
            f"{self.name}: {self.grid.cut_axis}={num_blocks} does not divide {size}"
        )
        return (*self.shape[:dim], size // num_blocks, *self.shape[dim + 1 :])

    def local_offsets(self, num_blocks: int, block: int) -> tuple[int, ...]:
        """The first index of block number `block` of `num_blocks` along each global dim."""
        if self.cut_dim is None:
            return (0,) * len(self.shape)
        size = self.shape[self.cut_dim] // num_blocks
        return tuple(size * block if d == self.cut_dim else 0 for d in range(len(self.shape)))
