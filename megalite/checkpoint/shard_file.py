"""The safetensors file of one rank: written as a stream, read by the slice.

It is written by the code here because the library needs the whole state of a rank in host memory at
once, and the file would have to be read again for its checksum; a stream needs one chunk. It is
read with the library. The manifest, not this file, has the rectangle of the global tensor that a
key stands for.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megalite.checkpoint.disk import Disk
from megalite.checkpoint.manifest import DTYPE_CODES, FileEntry, StoredRectangle
from megalite.errors import CheckpointError
from megalite.layout.rectangles import Rectangle, split

# our dtype name -> (torch dtype, safetensors code)
DTYPES: dict[str, tuple[torch.dtype, str]] = {
    name: (getattr(torch, name), code) for name, code in DTYPE_CODES.items()
}
_CHUNK_BYTES = 32 << 20  # written, or mapped for reading, at a time


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch dtype in manifests ("bfloat16"). Raises CheckpointError if not storable."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"cannot store dtype {name}; storable are {', '.join(DTYPES)}")
    return name


Entry = tuple[str, torch.dtype, tuple[int, ...]]  # key, type and shape of a tensor


def write_shard(disk: Disk, path: Path, parts: dict[str, torch.Tensor]) -> FileEntry:
    """Write and sync tensors (contiguous, any device) under their keys. Raises OSError."""
    # Widest elements first: every tensor then starts at a multiple of its element size.
    ordered = dict(sorted(parts.items(), key=lambda part: -part[1].element_size()))
    entries = [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in ordered.items()]
    return write_stream(disk, path, entries, ordered.values())


def write_stream(
    disk: Disk,
    path: Path,
    entries: Sequence[Entry],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Write and sync tensors that are made one after the other, as `entries` announces them.

    Wider types come first. metadata: texts for the file's header. Raises OSError.
    """
    digest, size_bytes = hashlib.sha256(), 0
    with disk.create(path) as file:
        for data in _file_chunks(entries, tensors, metadata):
            disk.write(file, data)
            digest.update(data)
            size_bytes += len(data)
        disk.sync_file(file)
    return FileEntry(size_bytes=size_bytes, sha256=digest.hexdigest())


def _file_chunks(
    entries: Sequence[Entry],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None,
) -> Iterator[bytes | memoryview]:
    """The file's content, one chunk at a time; a device tensor is copied to the host by chunks."""
    yield _header(entries, metadata)
    for tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        for first in range(0, flat.numel(), _CHUNK_BYTES):
            chunk = flat.narrow(0, first, min(_CHUNK_BYTES, flat.numel() - first))
            yield chunk.cpu().numpy().data


def _header(entries: Sequence[Entry], metadata: Mapping[str, str] | None) -> bytes:
    """The header by the safetensors format: its length, uint64, then JSON padded to 8 bytes."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for key, dtype, shape in entries:
        stop = position + math.prod(shape) * dtype.itemsize
        header[key] = {
            "dtype": DTYPES[dtype_name(dtype)][1],
            "shape": list(shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(math.ceil(len(text) / 8) * 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, eq=False)
class ShardRead:
    """A copy to do: the box `part` of a stored rectangle to `target`, of any type."""

    stored: StoredRectangle
    dtype: str  # that the stored tensor must have
    part: Rectangle  # offsets from the rectangle's first element
    target: torch.Tensor  # of the part's sizes


def read_shard(path: Path, reads: Sequence[ShardRead]) -> None:
    """Do all reads from one file. Raises CheckpointError naming the file.

    The file is memory-mapped. The mapping is renewed every 32 MiB (`_CHUNK_BYTES`), so beside the
    tensors that it fills a process has at most that much of the file in resident memory.
    """
    try:
        for batch in _batches(reads):
            with safe_open(path, framework="pt") as file:
                for read in batch:
                    _copy(file, read)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _copy(file: Any, read: ShardRead) -> None:
    key = read.stored.key
    entry = file.get_slice(key)
    found = (tuple(entry.get_shape()), entry.get_dtype())
    wanted = (read.stored.key_shape, DTYPES[read.dtype][1])
    if found != wanted:
        raise RuntimeError(f"{key!r} is {found}, the manifest says {wanted}")
    whole = file.get_tensor(key)  # of the mapping: nothing is read yet
    read.target.copy_(read.stored.view(whole)[read.part.slices()])


def _batches(reads: Sequence[ShardRead]) -> Iterator[list[ShardRead]]:
    """The reads cut into small ones, in groups that each touch about one chunk of the file."""
    batch: list[ShardRead] = []
    touched_bytes = 0
    for read in reads:
        for small in _slabs(read):
            batch.append(small)
            touched_bytes += _span_bytes(small)
            if touched_bytes >= _CHUNK_BYTES:
                yield batch
                batch, touched_bytes = [], 0
    if batch:
        yield batch


def _slabs(read: ShardRead) -> Iterator[ShardRead]:
    """The read cut into several of about one chunk each."""
    num_slabs = math.ceil(_span_bytes(read) / _CHUNK_BYTES)
    for slab in split(read.part, math.ceil(read.part.volume / num_slabs)):
        target = read.target[slab.relative_to(read.part).slices()]
        yield ShardRead(read.stored, read.dtype, slab, target)


def _span_bytes(read: ShardRead) -> int:
    """Bytes of the file from the first element read to the last, both included.

    That many pages are mapped in: a cut of columns touches every row, and so all of them.
    """
    sizes = read.stored.sizes
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    last = sum((size - 1) * s for size, s in zip(read.part.sizes, strides, strict=True))
    return (last + 1) * DTYPES[read.dtype][0].itemsize
