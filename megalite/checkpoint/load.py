"""Fill pieces from a checkpoint, whatever the layout that wrote it.

Each piece's rectangles are intersected with the stored ones and only the common parts are read,
straight into the piece's memory. Knows nothing of what the tensors mean.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from megalite.checkpoint.find import Checkpoint
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.ranks import Ranks, SingleRank, on_first, together
from megalite.checkpoint.shard_file import Read, dtype_name, read_shard
from megalite.errors import CheckpointError
from megalite.layout.rectangles import intersect

_NAMED = 5


def load(
    checkpoint: Checkpoint,
    pieces: Sequence[NamedPiece],
    ranks: Ranks | None = None,
    *,
    allow_unused: bool = False,
) -> None:
    """Fill every piece (owner or not) from an opened checkpoint. All ranks call it.

    Raises CheckpointError, the same on all ranks and before anything is written, for a tensor
    that is missing or has another shape or dtype, and for tensors of the checkpoint that no rank
    asks for unless `allow_unused` (weights only). A file that fails to read is named.
    """
    ranks = ranks or SingleRank()
    doing = f"loading {checkpoint.path.name}"
    plan = together(ranks, doing, lambda: plan_reads(checkpoint, pieces))
    asked = ranks.gather(json.dumps(sorted({p.name for p in pieces})).encode())
    if not allow_unused:
        on_first(ranks, doing, lambda: _refuse_unused(checkpoint, asked))
    together(ranks, doing, lambda: _read_all(checkpoint, plan))


def plan_reads(checkpoint: Checkpoint, pieces: Sequence[NamedPiece]) -> dict[str, list[Read]]:
    """The reads, by file name, that fill the pieces. Raises CheckpointError naming the tensor."""
    plan: dict[str, list[Read]] = {}
    for piece in pieces:
        _check(checkpoint, piece)
        entry = checkpoint.manifest.tensors[piece.name]
        for box, target in piece.rectangles():
            for stored in entry.rectangles:
                common = intersect(box, stored.box)
                if common is not None:
                    part = common.relative_to(stored.box)
                    view = target[common.relative_to(box).slices()]
                    read = Read(stored.key, stored.sizes, entry.dtype, part, view)
                    plan.setdefault(stored.file, []).append(read)
    return plan


def _check(checkpoint: Checkpoint, piece: NamedPiece) -> None:
    entry = checkpoint.manifest.tensors.get(piece.name)
    if entry is None:
        raise CheckpointError(
            f"tensor {piece.name} is not in {checkpoint.path}; "
            "use the config that it was saved with (it is in the manifest)"
        )
    dtype = dtype_name(piece.data.dtype)
    if entry.shape != tuple(piece.shape):
        raise CheckpointError(
            f"tensor {piece.name} has shape {entry.shape} in {checkpoint.path}, this run needs "
            f"{tuple(piece.shape)}; use the model settings that it was saved with"
        )
    if entry.dtype != dtype:
        raise CheckpointError(
            f"tensor {piece.name} is {entry.dtype} in {checkpoint.path}, this run needs {dtype}; "
            "use the precision settings that it was saved with"
        )


def _refuse_unused(checkpoint: Checkpoint, asked: Sequence[bytes]) -> bytes:
    wanted = {name for names in asked for name in json.loads(names)}
    unused = [name for name in checkpoint.manifest.tensors if name not in wanted]
    if unused:
        more = f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else ""
        raise CheckpointError(
            f"{checkpoint.path} holds tensors that this run has no place for: "
            f"{', '.join(unused[:_NAMED])}{more}; use the config that it was saved with"
        )
    return b""


def _read_all(checkpoint: Checkpoint, plan: dict[str, list[Read]]) -> None:
    for name, reads in plan.items():
        read_shard(checkpoint.path / name, reads)
