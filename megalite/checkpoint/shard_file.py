"""One rank's numbers in one safetensors file: written as a stream, read by the slice.

Written here and not through the library because a whole rank's state would have to lie in host
memory at once and be read again for its checksum; this way one chunk does. Read with the library.
The manifest, not this file, knows which rectangle of which tensor a key is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megalite.checkpoint.disk import Disk
from megalite.errors import CheckpointError
from megalite.layout.rectangles import Rectangle, split

# our dtype name -> (torch dtype, safetensors code)
DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "float64": (torch.float64, "F64"),
    "float32": (torch.float32, "F32"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float16": (torch.float16, "F16"),
    "int64": (torch.int64, "I64"),
    "int32": (torch.int32, "I32"),
    "int16": (torch.int16, "I16"),
    "int8": (torch.int8, "I8"),
    "uint8": (torch.uint8, "U8"),
    "bool": (torch.bool, "BOOL"),
}
_CHUNK_BYTES = 32 << 20


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch dtype in manifests ("bfloat16"). Raises CheckpointError if not storable."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"cannot store dtype {name}; storable are {', '.join(DTYPES)}")
    return name


@dataclass(frozen=True)
class Written:
    """Size and checksum of a finished file."""

    size_bytes: int
    sha256: str


def write_shard(disk: Disk, path: Path, parts: dict[str, torch.Tensor]) -> Written:
    """Write and sync tensors (contiguous, any device) under their keys. Raises OSError."""
    # widest first: every tensor then starts at a multiple of its element size
    ordered = sorted(parts.items(), key=lambda part: -part[1].element_size())
    digest, size_bytes = hashlib.sha256(), 0
    with disk.create(path) as file:
        for data in _content(ordered):
            disk.write(file, data)
            digest.update(data)
            size_bytes += len(data)
        disk.sync_file(file)
    return Written(size_bytes, digest.hexdigest())


def _content(parts: Sequence[tuple[str, torch.Tensor]]) -> Iterator[bytes | memoryview]:
    """The file, one chunk at a time; device tensors are copied to the host by the chunk."""
    yield _header(parts)
    for _, tensor in parts:
        flat = tensor.reshape(-1).view(torch.uint8)
        for first in range(0, flat.numel(), _CHUNK_BYTES):
            chunk = flat.narrow(0, first, min(_CHUNK_BYTES, flat.numel() - first))
            yield chunk.cpu().numpy().data


def _header(parts: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    entries: dict[str, Any] = {}
    position = 0
    for key, tensor in parts:
        stop = position + tensor.numel() * tensor.element_size()
        entries[key] = {
            "dtype": DTYPES[dtype_name(tensor.dtype)][1],
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(math.ceil(len(text) / 8) * 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, eq=False)
class Read:
    """Copy box `part` of the stored rectangle `key` (sizes and part counted in it) to `target`."""

    key: str
    sizes: tuple[int, ...]
    dtype: str
    part: Rectangle
    target: torch.Tensor


def read_shard(path: Path, reads: Sequence[Read]) -> None:
    """Do all reads from one file. Raises CheckpointError naming the file.

    The file is memory-mapped; the mapping is renewed every 32 MiB, so that a process never has
    more of the file in its resident memory, next to the tensors it fills.
    """
    try:
        for batch in _batches(reads):
            with safe_open(path, framework="pt") as file:
                for read in batch:
                    _copy(file, read)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _copy(file: Any, read: Read) -> None:
    view = file.get_slice(read.key)
    found = (tuple(view.get_shape()), view.get_dtype())
    wanted = (read.sizes, DTYPES[read.dtype][1])
    if found != wanted:
        raise RuntimeError(f"{read.key!r} is {found}, the manifest says {wanted}")
    # a 0-dim tensor has no dims to slice
    read.target.copy_(view[read.part.slices() or ...])


def _batches(reads: Sequence[Read]) -> Iterator[list[Read]]:
    """Reads cut small and grouped so that each group touches about one chunk of the file."""
    batch: list[Read] = []
    touched_bytes = 0
    for read in reads:
        for small in _cut(read):
            batch.append(small)
            touched_bytes += _span_bytes(small)
            if touched_bytes >= _CHUNK_BYTES:
                yield batch
                batch, touched_bytes = [], 0
    if batch:
        yield batch


def _cut(read: Read) -> Iterator[Read]:
    num_slabs = math.ceil(_span_bytes(read) / _CHUNK_BYTES)
    for slab in split(read.part, math.ceil(read.part.volume / num_slabs)):
        target = read.target[slab.relative_to(read.part).slices()]
        yield Read(read.key, read.sizes, read.dtype, slab, target)


def _span_bytes(read: Read) -> int:
    """Bytes of the file from the first to the last element: a cut of columns touches all pages."""
    strides = [math.prod(read.sizes[d + 1 :]) for d in range(len(read.sizes))]
    last = sum((size - 1) * s for size, s in zip(read.part.sizes, strides, strict=True))
    return (last + 1) * read.target.element_size()
