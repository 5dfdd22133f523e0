"""Reading shard files: how much of a file is mapped at a time."""

from __future__ import annotations

import pytest
import torch

from megalite.checkpoint import shard_file
from megalite.checkpoint.manifest import StoredRectangle
from megalite.checkpoint.shard_file import ShardRead
from megalite.layout.rectangles import Rectangle


@pytest.mark.parametrize(
    ("part", "shapes"),
    [
        (Rectangle((0, 0), (16, 8)), [[(2, 8)]] * 8),  # rows lie one after the other
        (Rectangle((0, 3), (16, 1)), [[(2, 1), (2, 1)]] * 4),  # 36 bytes from a row into the next
        (Rectangle((2, 1), (1, 5)), [[(1, 5)]]),
    ],
)
def test_a_mapping_is_renewed_after_about_a_chunk(
    part: Rectangle, shapes: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 64 bytes of a matrix with rows of 32; a cut of columns touches all rows."""
    monkeypatch.setattr(shard_file, "_CHUNK_BYTES", 64)
    target = torch.zeros(part.sizes)
    stored = StoredRectangle(file="a", key="x", offsets=(0, 0), sizes=(16, 8))
    batches = list(shard_file._batches([ShardRead(stored, "float32", part, target)]))
    assert [[read.part.sizes for read in batch] for batch in batches] == shapes
    assert sum(read.target.numel() for batch in batches for read in batch) == part.volume
