"""Filling pieces from a checkpoint, whatever the layout that wrote it.

Each piece's rectangles are intersected with the stored ones, and only the common parts are read,
straight into the piece's memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megalite.checkpoint.find import Checkpoint
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.shard_file import ShardRead, dtype_name, read_shard
from megalite.distributed.agree import ALONE, Ranks, on_all_ranks, on_first_rank
from megalite.errors import CheckpointError
from megalite.layout.rectangles import intersect

_MAX_NAMED = 5  # tensors in one message


def load(
    checkpoint: Checkpoint,
    pieces: Sequence[NamedPiece],
    ranks: Ranks = ALONE,
    *,
    whole_kinds: Collection[str] | None = None,
) -> None:
    """Fill every piece (owner or not) from an opened checkpoint. All ranks call it.

    Raises CheckpointError, the same on all ranks: before anything is written, for a tensor that is
    missing or has another shape or dtype, and for tensors of the checkpoint that no rank asks for,
    of all kinds or of `whole_kinds` alone; later for a file that cannot be read, by name.
    """
    doing = f"loading {checkpoint.path.name}"

    # Everything is checked on all ranks before the first read: no piece is filled when one fails.
    plan = on_all_ranks(ranks, lambda: plan_reads(checkpoint, pieces), doing)
    asked = ranks.gather(sorted({p.name for p in pieces}))
    on_first_rank(ranks, lambda: _refuse_unused(checkpoint, asked, whole_kinds), doing)

    on_all_ranks(ranks, lambda: _read_all(checkpoint, plan), doing)


def plan_reads(checkpoint: Checkpoint, pieces: Sequence[NamedPiece]) -> dict[str, list[ShardRead]]:
    """The reads, by file name, that fill the pieces. Raises CheckpointError naming the tensor."""
    plan: dict[str, list[ShardRead]] = {}
    for piece in pieces:
        _check(checkpoint, piece)
        entry = checkpoint.manifest.tensors[piece.name]
        for box, target in piece.rectangles():
            for stored in entry.rectangles:
                common = intersect(box, stored.box)
                if common is not None:
                    # The same elements, counted from the stored rectangle and from the piece's.
                    part = common.relative_to(stored.box)
                    view = target[common.relative_to(box).slices()]
                    read = ShardRead(stored.key, stored.sizes, entry.dtype, part, view)
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


def _refuse_unused(
    checkpoint: Checkpoint, asked: Sequence[Sequence[str]], kinds: Collection[str] | None
) -> None:
    """Raise CheckpointError if there are tensors that no rank asked for, by each rank's names."""
    wanted = {name for names in asked for name in names}
    saved = checkpoint.manifest.tensors
    whole = [name for name in saved if kinds is None or name.partition("/")[0] in kinds]
    unused = [name for name in whole if name not in wanted]
    if unused:
        more = f" and {len(unused) - _MAX_NAMED} more" if len(unused) > _MAX_NAMED else ""
        raise CheckpointError(
            f"{checkpoint.path} holds tensors that this run has no place for: "
            f"{', '.join(unused[:_MAX_NAMED])}{more}; use the config that it was saved with"
        )


def _read_all(checkpoint: Checkpoint, plan: dict[str, list[ShardRead]]) -> None:
    for name, reads in plan.items():
        read_shard(checkpoint.path / name, reads)
