"""Write a checkpoint with all ranks: every rank its own shard, rank 0 the manifest and the name.

Order on disk: shard files, manifest, directory, rename, parent directory, pointer; each synced
before the next. Until the rename nothing that a reader looks at has changed; a failure on any
rank is raised on all of them and leaves the older checkpoints as they were. Synchronous: pieces
must not change until it returns.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.disk import Disk
from megalite.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    StoredRectangle,
    TensorEntry,
    make_manifest,
    to_bytes,
)
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.ranks import Ranks, SingleRank, on_first, together
from megalite.checkpoint.shard_file import dtype_name, write_shard
from megalite.checkpoint.store import check_sizes, clean, publish, temporary
from megalite.errors import CheckpointError
from megalite.layout.rectangles import Rectangle

Table = dict[str, Any]


def save(
    root: Path,
    step: int,
    pieces: Sequence[NamedPiece],
    *,
    state: Mapping[str, Any],
    config: Any,
    layout: Mapping[str, int],
    ranks: Ranks | None = None,
    disk: Disk | None = None,
) -> Path:
    """Write `root/step-NNNNNNNN` from every rank's pieces and return its path. All ranks call it.

    `state` (trainer state), `config` (text or JSON) and `layout` (axis sizes) are rank 0's and
    must be JSON values. Raises CheckpointError, the same on all ranks, when a file cannot be
    written or the owners' pieces are not every element of every tensor exactly once.
    """
    ranks, disk = ranks or SingleRank(), disk or Disk()
    doing = f"saving step {step}"
    name = on_first(ranks, doing, lambda: _begin(root, step, disk).encode()).decode()
    directory = root / name

    def finish(tables: list[bytes]) -> bytes:
        manifest = merge_tables(step, [json.loads(t) for t in tables], state, config, layout)
        _see_all(directory, manifest)
        disk.write_file(directory / MANIFEST, to_bytes(manifest))
        disk.sync_dir(directory)
        return publish(root, step, directory, disk).name.encode()

    try:
        table = together(ranks, doing, lambda: write_pieces(directory, pieces, ranks.rank, disk))
        tables = ranks.gather(json.dumps(table).encode())
        return root / on_first(ranks, doing, lambda: finish(tables)).decode()
    except CheckpointError as error:
        # every rank has stopped writing when the error is agreed, so one may clear up for all
        if ranks.rank == 0:
            _abandon(directory, disk, error)
        ranks.barrier()
        raise


def _begin(root: Path, step: int, disk: Disk) -> str:
    disk.make_dir(root)
    clean(root, disk)
    directory = temporary(root, step, attempt=secrets.token_hex(4))
    disk.make_dir(directory)
    return directory.name


def _see_all(directory: Path, manifest: Manifest) -> None:
    try:
        check_sizes(directory, manifest, list(manifest.files))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}: rank 0 does not see another rank's file as it was written; "
            "put checkpoints on a file system that all nodes share"
        ) from error


def _abandon(directory: Path, disk: Disk, error: CheckpointError) -> None:
    try:
        if directory.exists():
            disk.remove(directory)
    except OSError as second:
        # the first error is the one to report; the next save removes the rest
        error.add_note(f"{directory} could not be removed: {second}")


def write_pieces(directory: Path, pieces: Sequence[NamedPiece], rank: int, disk: Disk) -> Table:
    """Write one rank's owned pieces to its shard file, if it has any, and return its table.

    The table (JSON) names all tensors the rank has pieces of, also those that others own.
    """
    file_name = f"rank-{rank:05d}.safetensors"
    parts: dict[str, torch.Tensor] = {}
    tensors: Table = {}
    for piece in pieces:
        seen = {"shape": list(piece.shape), "dtype": dtype_name(piece.data.dtype)}
        entry = tensors.setdefault(piece.name, {**seen, "rectangles": []})
        _same(piece.name, entry, seen)
        for box, view in piece.rectangles() if piece.owner else []:
            key = _key(piece, box)
            if key in parts:
                raise CheckpointError(f"{key} is handed in twice")
            parts[key] = view
            entry["rectangles"].append([file_name, key, box.offsets, box.sizes])
    if not parts:
        return {"files": {}, "tensors": tensors}
    try:
        written = write_shard(disk, directory / file_name, parts)
    except OSError as error:
        size_bytes = sum(part.numel() * part.element_size() for part in parts.values())
        raise CheckpointError(
            f"{directory / file_name} ({size_bytes} bytes) cannot be written: {error.strerror}"
        ) from error
    return {"files": {file_name: [written.size_bytes, written.sha256]}, "tensors": tensors}


def _key(piece: NamedPiece, box: Rectangle) -> str:
    """Key inside the shard file: the plain name for a whole tensor, else with its offsets."""
    whole = box.sizes == tuple(piece.shape)
    return piece.name if whole else f"{piece.name}@{','.join(map(str, box.offsets))}"


def merge_tables(
    step: int,
    tables: Sequence[Table],
    state: Mapping[str, Any],
    config: Any,
    layout: Mapping[str, int],
) -> Manifest:
    """One manifest from all ranks' tables; raises CheckpointError unless every tensor is whole."""
    files: dict[str, FileEntry] = {}
    tensors: Table = {}
    for table in tables:
        for name, (size_bytes, sha256) in table["files"].items():
            files[name] = FileEntry(size_bytes=size_bytes, sha256=sha256)
        for name, mine in table["tensors"].items():
            entry = tensors.setdefault(name, {**mine, "rectangles": []})
            _same(name, entry, mine)
            entry["rectangles"] += [_stored(*row) for row in mine["rectangles"]]
    return make_manifest(
        step=step,
        layout=dict(layout),
        config=config,
        state=dict(state),
        files=files,
        tensors={name: _tensor_entry(entry) for name, entry in sorted(tensors.items())},
    )


def _stored(file: str, key: str, offsets: list[int], sizes: list[int]) -> StoredRectangle:
    return StoredRectangle(file=file, key=key, offsets=tuple(offsets), sizes=tuple(sizes))


def _tensor_entry(entry: Table) -> TensorEntry:
    return TensorEntry(
        shape=tuple(entry["shape"]),
        dtype=entry["dtype"],
        rectangles=tuple(entry["rectangles"]),
    )


def _same(name: str, one: Table, other: Table) -> None:
    for field in ("shape", "dtype"):
        if one[field] != other[field]:
            raise CheckpointError(
                f"tensor {name}: pieces disagree on {field}: {one[field]} and {other[field]}"
            )
