"""Filling pieces from a checkpoint, whatever the layout that wrote it.

Each piece's rectangles are intersected with the stored ones, and only the common parts are read,
straight into the piece's memory. Of weights alone the stored types may be others, and the rows of a
vocabulary more or fewer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from megalite.checkpoint.find import Checkpoint
from megalite.checkpoint.manifest import TensorEntry
from megalite.checkpoint.pieces import BoxPiece, NamedPiece
from megalite.checkpoint.shard_file import DTYPES, ShardRead, dtype_name, read_shard
from megalite.distributed.agree import ALONE, Ranks, on_all_ranks, on_first_rank
from megalite.errors import CheckpointError
from megalite.layout.rectangles import Rectangle, intersect, split
from megalite.wording import number_of

_MAX_NAMED = 5  # tensors in one message
_MEAN_ELEMENTS = 1 << 22  # of a table, in memory at a time

Piece = NamedPiece | BoxPiece
Plan = dict[str, list[ShardRead]]


def load(
    checkpoint: Checkpoint,
    pieces: Sequence[Piece],
    ranks: Ranks = ALONE,
    *,
    whole_kinds: Collection[str] | None = None,
    vocab_size: int | None = None,
) -> None:
    """Fill every piece (owner or not) from an opened checkpoint. All ranks call it.

    vocab_size: for weights alone, the true vocabulary of the checkpoint. Types are then converted,
    and of a vocabulary's table the rows that both have are read; new true rows become the mean of
    the stored ones, rows that pad 0. Without it every shape and type must be equal.

    Raises CheckpointError, the same on all ranks: before anything is written, for a tensor that is
    missing or has another shape or dtype, and for tensors of the checkpoint that no rank asks for,
    of all kinds or of `whole_kinds` alone; later for a file that cannot be read, by name.
    """
    doing = f"loading {checkpoint.path.name}"

    def make_plan() -> Plan:
        for piece in pieces:
            _check(checkpoint, piece, vocab_size)
        return plan_reads(checkpoint, pieces, vocab_size)

    # Everything is checked on all ranks before the first read: no piece is filled when one fails.
    plan = on_all_ranks(ranks, make_plan, doing)
    asked = ranks.gather(sorted({p.name for p in pieces}))
    on_first_rank(ranks, lambda: _refuse_unused(checkpoint, asked, whole_kinds), doing)

    def read() -> None:
        read_all(checkpoint, plan)
        if vocab_size is not None:
            for piece in pieces:
                _fill_rows(checkpoint, piece, vocab_size)

    on_all_ranks(ranks, read, doing)


def plan_reads(
    checkpoint: Checkpoint, pieces: Sequence[Piece], vocab_size: int | None = None
) -> Plan:
    """The reads, by file name, that fill the pieces with what is stored of them."""
    plan: Plan = {}
    for piece in pieces:
        entry = checkpoint.manifest.tensors[piece.name]
        rows = _stored_rows(entry, piece, vocab_size)
        for box, target in piece.rectangles():
            add_reads(plan, entry, box, target, rows)
    return plan


def add_reads(
    plan: Plan, entry: TensorEntry, box: Rectangle, target: torch.Tensor, rows: int | None = None
) -> None:
    """Add to a plan the reads that fill `target` with a box of a tensor, up to row `rows`."""
    if rows is not None:
        box = Rectangle(
            box.offsets, (max(0, min(box.stops[0], rows) - box.offsets[0]), *box.sizes[1:])
        )
    for stored in entry.rectangles:
        common = intersect(box, stored.box)
        if common is not None:
            # The same elements, counted from the stored rectangle and from the target's.
            part = common.relative_to(stored.box)
            view = target[common.relative_to(box).slices()]
            plan.setdefault(stored.file, []).append(ShardRead(stored, entry.dtype, part, view))


def read_all(checkpoint: Checkpoint, plan: Plan) -> None:
    """Do the reads of a plan. Raises CheckpointError naming a file that cannot be read."""
    for name, reads in plan.items():
        read_shard(checkpoint.path / name, reads)


def _stored_rows(entry: TensorEntry, piece: Piece, vocab_size: int | None) -> int | None:
    """The true rows that a vocabulary's table is stored with; None for other tensors."""
    if vocab_size is None or piece.num_true_rows is None:
        return None
    return min(entry.shape[0], vocab_size)


def _check(checkpoint: Checkpoint, piece: Piece, vocab_size: int | None) -> None:
    entry = checkpoint.manifest.tensors.get(piece.name)
    if entry is None:
        raise CheckpointError(
            f"tensor {piece.name} is not in {checkpoint.path}; "
            "use the config that it was saved with (it is in the manifest)"
        )
    dtype = dtype_name(piece.data.dtype)
    rows = _stored_rows(entry, piece, vocab_size)
    skipped = 0 if rows is None else 1  # dims that may differ
    if entry.shape[skipped:] != tuple(piece.shape)[skipped:]:
        raise CheckpointError(
            f"tensor {piece.name} has shape {entry.shape} in {checkpoint.path}, this run needs "
            f"{tuple(piece.shape)}; use the model settings that it was saved with"
        )
    if rows is not None and rows > (piece.num_true_rows or 0):
        raise CheckpointError(
            f"tensor {piece.name} has {number_of(rows, 'token')} in {checkpoint.path}, this "
            "run needs "
            f"{piece.num_true_rows}; a vocabulary can grow, not shrink"
        )
    both_float = DTYPES[entry.dtype][0].is_floating_point and piece.data.is_floating_point()
    if entry.dtype != dtype and not (vocab_size is not None and both_float):
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


def _fill_rows(checkpoint: Checkpoint, piece: Piece, vocab_size: int) -> None:
    """Fill the rows of a vocabulary's table that are not stored."""
    entry = checkpoint.manifest.tensors[piece.name]
    rows = _stored_rows(entry, piece, vocab_size)
    if rows is None or piece.num_true_rows is None:
        return
    mean: torch.Tensor | None = None
    for box, target in piece.rectangles():
        for first, stop, is_true in (
            (rows, piece.num_true_rows, True),
            (piece.num_true_rows, piece.shape[0], False),
        ):
            wanted = Rectangle((first, 0), (stop - first, piece.shape[1]))
            common = intersect(box, wanted)
            if common is None:
                continue
            view = target[common.relative_to(box).slices()]
            if is_true:
                mean = _mean_row(checkpoint, entry, rows) if mean is None else mean
                view.copy_(mean[common.slices()[1]].expand_as(view))
            else:
                view.zero_()


def _mean_row(checkpoint: Checkpoint, entry: TensorEntry, rows: int) -> torch.Tensor:
    """The mean of a table's rows, float64: in blocks of rows, so that every layout has its bits."""
    total = torch.zeros(entry.shape[1], dtype=torch.float64)
    width = entry.shape[1]
    for box in split(Rectangle((0, 0), (rows, width)), max(width, _MEAN_ELEMENTS)):
        block = torch.empty(box.sizes, dtype=torch.float64)
        plan: Plan = {}
        add_reads(plan, entry, box, block)
        read_all(checkpoint, plan)
        total += block.sum(0)
    return total / rows
