"""Fingerprints of the content of indexed datasets, to notice data changed in place.

A fingerprint covers the sizes, the index, the token file and the loss mask, if any: each whole up
to 64 MiB, above that 1,024 evenly spread blocks of 4 KiB with both ends. It does not depend on the
files' times: copying to a node's own disk, or touching, changes nothing. A change between the
blocks of a large file leaves the fingerprint alone, but not the file's time; so that is kept beside
it, and reported.
A checksum covers every byte of the files, so it takes as long as reading them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WHOLE_BYTES = 64 << 20
BLOCK_BYTES = 4096
NUM_BLOCKS = 1024


@dataclass(frozen=True)
class Identity:
    """A dataset's fingerprint, and the size and time of its token file."""

    path: str
    fingerprint: str
    num_bytes: int  # of the token file
    mtime_ns: int


def as_saved(identities: Mapping[str, Identity]) -> dict[str, dict[str, Any]]:
    """Identities by name, in the form that checkpoints store."""
    return {name: asdict(known) for name, known in identities.items()}


def fingerprint_files(bin_path: Path, idx_path: Path, *more: Path) -> str:
    """Hex sha256 over sizes, index and token bytes, and `more` files, as described at the top."""
    digest = hashlib.sha256()
    paths = (idx_path, bin_path, *more)
    sizes = {path: path.stat().st_size for path in paths}
    stated = " ".join(str(sizes[path]) for path in (bin_path, idx_path, *more))
    digest.update(f"megalite-1 {stated}".encode())
    for path in paths:
        with path.open("rb") as stream:
            for start, length in _blocks(sizes[path]):
                stream.seek(start)
                digest.update(stream.read(length))
    return digest.hexdigest()


def checksum_files(bin_path: Path, idx_path: Path, *more: Path) -> str:
    """CRC-32 of the index, the tokens and `more` files, one after the other, in hex."""
    found = 0
    for path in (idx_path, bin_path, *more):
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                found = zlib.crc32(block, found)
    return f"{found:08x}"


def _blocks(size: int) -> list[tuple[int, int]]:
    """(start, length) in bytes of the blocks of a file that are hashed."""
    if size <= WHOLE_BYTES:
        return [(start, 1 << 20) for start in range(0, size, 1 << 20)]
    last = size - BLOCK_BYTES
    return [(last * number // (NUM_BLOCKS - 1), BLOCK_BYTES) for number in range(NUM_BLOCKS)]


def sha256_file(path: Path) -> str:
    """Hex sha256 of a whole file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
