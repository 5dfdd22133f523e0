"""`NamedPiece`, the part of a named global tensor that one rank holds: input of save and load.

A piece is a contiguous range of this rank's row-major shard of a global tensor: a whole parameter,
a tensor-parallel shard, or the slice of a flat buffer that one data-parallel rank owns. Does not
read or write files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megalite.layout.rectangles import Rectangle, global_rectangles, intersect
from megalite.layout.sharding import ShardSpec


@dataclass(frozen=True, eq=False)
class NamedPiece:
    """Elements [start, stop) of a flattened shard that lies at `local_offsets` of a global tensor.

    `data` is 1-D and contiguous with stop - start elements, on any device; loading writes into
    it. `owner` is True on exactly one of the ranks that hold the same elements: only owners
    write, all load. A rank that holds nothing of a tensor may leave its piece out or give an
    empty one.
    """

    name: str  # global name with its kind in front: "param/...", "master/...", "exp_avg/..."
    shape: tuple[int, ...]  # of the global tensor
    local_shape: tuple[int, ...]  # of this rank's shard
    local_offsets: tuple[int, ...]  # of the shard's first element in the global tensor
    start: int
    stop: int
    data: torch.Tensor
    owner: bool = True
    num_true_rows: int | None = None  # rows from here on pad a vocabulary

    def __post_init__(self) -> None:
        box = Rectangle(tuple(self.local_offsets), tuple(self.local_shape))
        assert len(box.offsets) == len(box.sizes) == len(self.shape), f"{self.name}: dims differ"
        whole = Rectangle((0,) * len(self.shape), tuple(self.shape))
        inside = not box.volume or intersect(box, whole) == box
        assert inside, f"{self.name}: {box} reaches outside {self.shape}"
        assert 0 <= self.start <= self.stop <= math.prod(self.local_shape), (
            f"{self.name}: range [{self.start}, {self.stop}) is not inside {self.local_shape}"
        )
        assert self.data.shape == (self.stop - self.start,), f"{self.name}: data has wrong length"
        assert self.data.is_contiguous(), f"{self.name}: data is not contiguous"

    @classmethod
    def whole(cls, name: str, data: torch.Tensor, owner: bool = True) -> NamedPiece:
        """The piece for a tensor that this rank holds in full; `data` is contiguous, any shape."""
        shape, flat = tuple(data.shape), data.detach().view(-1)
        return cls(name, shape, shape, (0,) * len(shape), 0, flat.numel(), flat, owner)

    @classmethod
    def of_shard(
        cls,
        kind: str,
        spec: ShardSpec,
        num_blocks: int,
        block: int,
        data: torch.Tensor,
        start: int = 0,
        owner: bool = True,
    ) -> NamedPiece:
        """Elements [start, start + data.numel()) of one of `num_blocks` flat blocks of `spec`.

        Named "kind/spec.name". `data` is contiguous; the caller says which rank owns a tensor that
        several hold.
        """
        flat = data.detach().view(-1)
        return cls(
            name=f"{kind}/{spec.name}",
            shape=spec.shape,
            local_shape=spec.local_shape(num_blocks),
            local_offsets=spec.local_offsets(num_blocks, block),
            start=start,
            stop=start + flat.numel(),
            data=flat,
            owner=owner,
            num_true_rows=spec.num_true_rows,
        )

    def rectangles(self) -> list[tuple[Rectangle, torch.Tensor]]:
        """The piece as rectangles of the global tensor, each with its view of `data`."""
        # A range of a flattened shard is in general several rectangles: part of a row, rows, part
        # of a row. Their elements follow one another in `data`.
        found, first, flat = [], 0, self.data.detach()
        for box in global_rectangles(self.local_shape, self.local_offsets, self.start, self.stop):
            found.append((box, flat.narrow(0, first, box.volume).view(box.sizes)))
            first += box.volume
        return found


@dataclass(frozen=True, eq=False)
class BoxPiece:
    """A box of a named global tensor, and the view that loading fills with it."""

    name: str
    shape: tuple[int, ...]  # of the global tensor
    box: Rectangle
    data: torch.Tensor
    num_true_rows: int | None = None

    def rectangles(self) -> list[tuple[Rectangle, torch.Tensor]]:
        """The box, and its view."""
        return [(self.box, self.data)]
