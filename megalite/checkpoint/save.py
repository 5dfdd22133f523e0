"""Writing a checkpoint: every rank writes its own shard file, rank 0 the manifest.

Order on disk: shard files, manifest, directory, rename, parent directory, pointer; each is synced
before the next. Until the rename nothing that a reader looks at has changed. A failure on any rank
is raised on all of them and leaves the older checkpoints as they were. Synchronous: pieces must not
change until `save` returns.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.disk import Disk
from megalite.checkpoint.manifest import FileEntry, Manifest, TensorEntry, make_manifest, to_bytes
from megalite.checkpoint.names import MANIFEST
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.shard_file import dtype_name, write_shard
from megalite.checkpoint.store import check_sizes, publish, remove_leftovers, temporary_path
from megalite.distributed.agree import ALONE, Ranks, on_all_ranks, on_first_rank
from megalite.errors import CheckpointError, cannot_write
from megalite.layout.rectangles import Rectangle
from megalite.wording import number_of

# A rank's account of its pieces: the "files" and "tensors" of its part of the manifest, as JSON.
Table = dict[str, Any]


def save(
    root: Path,
    step: int,
    pieces: Sequence[NamedPiece],
    *,
    state: Mapping[str, Any],
    config: Any,
    layout: Mapping[str, int],
    ranks: Ranks = ALONE,
    disk: Disk | None = None,
) -> Path:
    """Write `root/step-NNNNNNNN` from every rank's pieces and return its path. All ranks call it.

    `state` (trainer state), `config` (text or JSON) and `layout` (axis sizes) are rank 0's and
    must be JSON values. Raises CheckpointError, the same on all ranks, when a file cannot be
    written or the owners' pieces are not every element of every tensor exactly once.
    """
    disk = disk or Disk()
    doing = f"saving step {step}"

    # Rank 0 draws the directory's name, as it has a random part that all ranks must share.
    name = on_first_rank(ranks, lambda: _make_directory(root, step, disk), doing)
    directory = root / name

    def finish(tables: list[Table]) -> str:
        manifest = merge_tables(step, tables, state, config, layout)
        _require_visible(directory, manifest)
        disk.write_file(directory / MANIFEST, to_bytes(manifest))
        disk.sync_dir(directory)
        return publish(root, step, directory, disk).name

    try:
        table = on_all_ranks(
            ranks, lambda: write_pieces(directory, pieces, ranks.rank, disk), doing
        )
        tables = ranks.gather(table)
        return root / on_first_rank(ranks, lambda: finish(tables), doing)
    except CheckpointError as error:
        # The error is raised on all ranks, so every rank has stopped writing: rank 0 may delete.
        if ranks.rank == 0:
            _remove_directory(directory, disk, error)
        ranks.any(False)  # no rank goes on before it is gone
        raise


def _make_directory(root: Path, step: int, disk: Disk) -> str:
    """Make the temporary directory that a step is written to; returns its name."""
    disk.make_dir(root)
    remove_leftovers(root, disk)
    directory = temporary_path(root, step, attempt=secrets.token_hex(4))
    disk.make_dir(directory)
    return directory.name


def _require_visible(directory: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless rank 0 sees all ranks' files in full."""
    try:
        check_sizes(directory, manifest, list(manifest.files))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}: rank 0 does not see another rank's file as it was written; "
            "put checkpoints on a file system that all nodes share"
        ) from error


def _remove_directory(directory: Path, disk: Disk, error: CheckpointError) -> None:
    """Remove the temporary directory of a save that failed by `error`."""
    try:
        if directory.exists():
            disk.remove(directory)
    except OSError as second:
        # The first error is the one to report; the next save removes the directory.
        error.add_note(f"{directory} could not be removed: {second}")


def write_pieces(directory: Path, pieces: Sequence[NamedPiece], rank: int, disk: Disk) -> Table:
    """Write the pieces that a rank owns to its shard file, if there are any; return its table.

    The table names all tensors that the rank has pieces of, also those that other ranks own.
    Raises CheckpointError for pieces that contradict each other, or if the file cannot be written.
    """
    file_name = f"rank-{rank:05d}.safetensors"
    parts: dict[str, torch.Tensor] = {}
    tensors: Table = {}
    for piece in pieces:
        found = {"shape": list(piece.shape), "dtype": dtype_name(piece.data.dtype)}
        entry = tensors.setdefault(piece.name, {**found, "rectangles": []})
        _require_same(piece.name, entry, found)
        if not piece.owner:
            continue
        for box, view in piece.rectangles():
            key = _key(piece, box)
            if key in parts:
                raise CheckpointError(f"{key} is handed in twice")
            parts[key] = view
            place = {"offsets": box.offsets, "sizes": box.sizes}
            entry["rectangles"].append({"file": file_name, "key": key, **place})

    # A rank that owns nothing writes no file, so the manifest must not list one.
    if not parts:
        return {"files": {}, "tensors": tensors}
    try:
        written = write_shard(disk, directory / file_name, parts)
    except OSError as error:
        size_bytes = sum(part.numel() * part.element_size() for part in parts.values())
        what = f"{directory / file_name} ({number_of(size_bytes, 'byte')})"
        raise CheckpointError(cannot_write(what, error)) from error
    return {"files": {file_name: written.model_dump()}, "tensors": tensors}


def _key(piece: NamedPiece, box: Rectangle) -> str:
    """A rectangle's key in the shard file: NAME for a whole tensor, else NAME@OFFSET,OFFSET,..."""
    whole = box.sizes == tuple(piece.shape)
    return piece.name if whole else f"{piece.name}@{','.join(map(str, box.offsets))}"


def merge_tables(
    step: int,
    tables: Sequence[Table],
    state: Mapping[str, Any],
    config: Any,
    layout: Mapping[str, int],
) -> Manifest:
    """The manifest from all ranks' tables; raises CheckpointError unless every tensor is whole."""
    files: Table = {}
    tensors: Table = {}
    for table in tables:
        files |= table["files"]
        for name, found in table["tensors"].items():
            entry = tensors.setdefault(name, {**found, "rectangles": []})
            _require_same(name, entry, found)
            entry["rectangles"] += found["rectangles"]

    # The manifest checks itself: the rectangles of a tensor must cover each element exactly once.
    return make_manifest(
        step=step,
        layout=dict(layout),
        config=config,
        state=dict(state),
        files={name: FileEntry(**entry) for name, entry in files.items()},
        tensors={
            name: TensorEntry.model_validate_json(json.dumps(entry))
            for name, entry in sorted(tensors.items())
        },
    )


def _require_same(name: str, one: Table, other: Table) -> None:
    """Raise CheckpointError if two pieces of a tensor disagree on its shape or dtype."""
    for field in ("shape", "dtype"):
        if one[field] != other[field]:
            raise CheckpointError(
                f"tensor {name}: pieces disagree on {field}: {one[field]} and {other[field]}"
            )
