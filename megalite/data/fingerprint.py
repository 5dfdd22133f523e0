"""A short name for the content of an indexed dataset, to notice data changed in place.

Covers the two sizes, all of the index, and the token file: whole up to 64 MiB, above that 1,024
evenly spread blocks of 4 KiB with both ends. A change between the blocks of a large file that
keeps every document's length is not seen; times of files play no part.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

WHOLE_BYTES = 64 << 20
BLOCK_BYTES = 4096
NUM_BLOCKS = 1024


def fingerprint_files(bin_path: Path, idx_path: Path) -> str:
    """Hex sha256 over sizes, index and (sampled) token bytes."""
    digest = hashlib.sha256()
    sizes = (bin_path.stat().st_size, idx_path.stat().st_size)
    digest.update(f"megalite-1 {sizes[0]} {sizes[1]}".encode())
    with idx_path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    with bin_path.open("rb") as stream:
        for start, length in _blocks(sizes[0]):
            stream.seek(start)
            digest.update(stream.read(length))
    return digest.hexdigest()


def _blocks(size: int) -> list[tuple[int, int]]:
    if size <= WHOLE_BYTES:
        return [(start, 1 << 20) for start in range(0, size, 1 << 20)]
    last = size - BLOCK_BYTES
    return [(last * number // (NUM_BLOCKS - 1), BLOCK_BYTES) for number in range(NUM_BLOCKS)]


def sha256_file(path: Path) -> str:
    """Hex sha256 of a whole file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
