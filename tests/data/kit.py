"""Datasets for tests, made by the writer under test or byte by byte; settings of properties."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from hypothesis import settings

from megalite.corpus.indexed_writer import IndexedWriter

Documents = Sequence[Sequence[int]]
PROPERTY = settings(deadline=None, derandomize=True, max_examples=40)


def write_dataset(prefix: Path, documents: Documents, vocab_size: int = 1000) -> Path:
    with IndexedWriter(prefix, vocab_size) as writer:
        for ids in documents:
            writer.add_document(ids)
        writer.publish()
    return prefix


def index_bytes(
    lengths: Sequence[int],
    documents: Sequence[int],
    code: int = 8,
    item_bytes: int = 2,
    modes: Sequence[int] = (),
) -> bytes:
    """An .idx written out by the format's table, without the product's code."""
    offsets, total = [], 0
    for length in lengths:
        offsets.append(total)
        total += length * item_bytes
    out = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, code)
    out += struct.pack("<QQ", len(lengths), len(documents))
    out += struct.pack(f"<{len(lengths)}i", *lengths)
    out += struct.pack(f"<{len(lengths)}q", *offsets)
    out += struct.pack(f"<{len(documents)}q", *documents)
    return out + struct.pack(f"<{len(modes)}b", *modes)
