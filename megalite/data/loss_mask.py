"""`PREFIX.mask`: which tokens of a dataset are trained on, one byte a token beside its `.bin`.

A header of magic, version and number of tokens, then a byte for each token in the order of the
stream: 1 if its prediction counts in the loss, 0 if not. Without the file every token counts.
"""

from __future__ import annotations

import os
import struct
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.errors import DataError
from megalite.wording import number_of

SUFFIX = ".mask"
MAGIC = b"MLMASK\x00\x00"
VERSION = 1
HEADER = struct.Struct("<8sQQ")  # magic, version, tokens


class LossMask:
    """The mask of a dataset of `num_tokens` tokens; DataError if the file is not that."""

    def __init__(self, path: Path, num_tokens: int) -> None:
        self.path, self.num_tokens = path, num_tokens
        size = path.stat().st_size
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        start = os.pread(self._descriptor, HEADER.size, 0)
        if len(start) < HEADER.size or not start.startswith(MAGIC):
            raise DataError(f"{path}: not a loss mask; prepare the dataset again")
        _, version, count = HEADER.unpack(start)
        if version != VERSION:
            raise DataError(
                f"{path}: version: found {version}, wanted {VERSION}; it was made by a later "
                "megalite, which can read it"
            )
        found = (count, size - HEADER.size)
        if found != (num_tokens, num_tokens):
            raise DataError(
                f"{path}: states {number_of(count, 'token')} and holds {size - HEADER.size}, "
                "the dataset beside "
                f"it has {num_tokens}: they are not of one run; prepare the dataset again"
            )

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The mask of tokens start .. stop - 1, copied; DataError if the file lacks them."""
        found = os.pread(self._descriptor, stop - start, HEADER.size + start)
        if len(found) != stop - start:
            raise DataError(f"{self.path}: was shortened after it was opened; copy it again")
        return np.frombuffer(found, dtype=np.uint8)


def header(num_tokens: int) -> bytes:
    """The beginning of the file."""
    return HEADER.pack(MAGIC, VERSION, num_tokens)
