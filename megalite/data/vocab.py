"""The check that a dataset's ids fit a model's vocabulary, before the first step, in bounded time.

The largest id is known from the dtype if that is narrow enough; else from a scan of a dataset of up
to SCAN_TOKENS; else from the sidecar, which must be that of these files; else from a scan of
SAMPLE_TOKENS, spread evenly over the dataset. The result names the method: after a sample,
microbatches should be checked too (Batches: vocab_size).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megalite.data.indexed import IndexedDataset
from megalite.data.sidecar import Sidecar
from megalite.errors import DataError
from megalite.wording import number_of

SCAN_TOKENS = 100_000_000
SAMPLE_TOKENS = 1 << 24
SCAN_BLOCK = 1 << 18  # tokens read at a time; no page of the file stays mapped


@dataclass(frozen=True)
class VocabCheck:
    """The largest id of a dataset, or a bound on it; `how` that is known, `detail` in words."""

    how: Literal["dtype", "scan", "sidecar", "sample"]
    max_id: int
    detail: str


def check_vocab(data: IndexedDataset, sidecar: Sidecar | None, vocab_size: int) -> VocabCheck:
    """Raise DataError, with both numbers, if an id reaches `vocab_size`; else return the check."""
    check = largest_id(data, sidecar, vocab_size)
    if check.max_id >= vocab_size:
        raise DataError(
            f"{data.bin_path}: holds token id {check.max_id} ({check.detail}), the model has "
            f"model.vocab_size={vocab_size}; set it to {check.max_id + 1} or more, "
            "or prepare the data with the model's tokenizer"
        )
    return check


def largest_id(data: IndexedDataset, sidecar: Sidecar | None, vocab_size: int) -> VocabCheck:
    """The largest id of a dataset, or a bound below `vocab_size`, with how it is known."""
    count, limits = data.num_tokens, np.iinfo(data.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return VocabCheck("dtype", int(limits.max), f"largest value of {data.dtype.name}")
    if count <= SCAN_TOKENS:
        return VocabCheck("scan", _scan(data, 1), f"largest of all {number_of(count, 'token')}")
    if sidecar is not None:
        return VocabCheck("sidecar", sidecar.max_id, f"as {data.prefix}.json states")
    every = -(-count // SAMPLE_TOKENS)
    detail = f"largest in a sample, 1 of {every} blocks of {SCAN_BLOCK} tokens"
    return VocabCheck("sample", _scan(data, every), detail)


def _scan(data: IndexedDataset, every: int) -> int:
    """The largest id in every `every`-th block of tokens; DataError for a negative id."""
    largest = -1
    for start in range(0, data.num_tokens, SCAN_BLOCK * every):
        part = data.read(start, min(start + SCAN_BLOCK, data.num_tokens))
        if (low := int(part.min())) < 0:
            raise DataError(
                f"{data.bin_path}: holds token id {low}; ids must be 0 or more: "
                "the file is damaged or of another kind"
            )
        largest = max(largest, int(part.max()))
    return largest
