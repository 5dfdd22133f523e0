"""The samples that a span of tokens is cut into: windows of its stream, or whole documents.

A sample is a window of tokens of the span: all but its last are inputs, all but its first are
labels. Pure arithmetic over lengths; reads no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.wording import number_of


@dataclass(frozen=True)
class Packing:
    """The way that samples of `seq_length` labels are cut.

    `whole_documents`: each sample holds whole documents, and what is left of it is padding. A
    document that is longer is cut there, or left out with `drop_long`.
    """

    seq_length: int
    whole_documents: bool = False
    drop_long: bool = False

    @classmethod
    def of(cls, packing: Packing | int) -> Packing:
        """The packing itself; of an int, that of the stream."""
        return cls(packing) if isinstance(packing, int) else packing

    @property
    def least_tokens(self) -> int:
        """The tokens that a sample takes at least."""
        return 2 if self.whole_documents else self.seq_length + 1


class Samples(Protocol):
    """The samples of a span."""

    @property
    def num_samples(self) -> int:
        """The number of samples."""

    def window(self, sample: int) -> tuple[int, int]:
        """First token of a sample in the span, and the end of its last one."""

    def notes(self) -> list[str]:
        """Lines about what was cut, left out or filled up; [] if nothing was."""


@dataclass(frozen=True)
class StreamSamples:
    """Consecutive windows of S + 1 tokens, which share one: no token but the first is no label."""

    num_tokens: int
    seq_length: int

    @property
    def num_samples(self) -> int:
        return max(0, (self.num_tokens - 1) // self.seq_length)

    def window(self, sample: int) -> tuple[int, int]:
        first = sample * self.seq_length
        return first, first + self.seq_length + 1

    def notes(self) -> list[str]:
        return []


class DocumentSamples:
    """Whole documents, in order, as many as fit into each sample of S + 1 tokens ("next fit").

    starts: [documents + 1], the first token of each document in the span, and the end.
    """

    def __init__(self, starts: NDArray[np.int64], packing: Packing) -> None:
        limit = packing.seq_length + 1
        lengths = np.diff(starts)
        self._drops, self._room = packing.drop_long, packing.seq_length
        self._long = lengths[lengths > limit] - limit  # tokens beyond, of each that is too long
        windows: list[tuple[int, int]] = []
        number, count = 0, len(lengths)
        while number < count:
            first = int(starts[number])
            if lengths[number] > limit:
                if not packing.drop_long:
                    windows.append((first, first + limit))
                number += 1
                continue
            number = int(np.searchsorted(starts, first + limit, side="right")) - 1
            if starts[number] - first > 1:  # else there is nothing to predict
                windows.append((first, int(starts[number])))
        self._windows = np.array(windows, dtype=np.int64).reshape(-1, 2)

    @property
    def num_samples(self) -> int:
        return len(self._windows)

    def window(self, sample: int) -> tuple[int, int]:
        first, stop = self._windows[sample].tolist()
        return first, stop

    def notes(self) -> list[str]:
        filled = int((self._windows[:, 1] - self._windows[:, 0] - 1).sum())
        places = max(1, self.num_samples * self._room)
        notes = [f"whole documents fill {filled / places:.1%} of the samples"]
        if len(self._long):
            limit = self._room + 1
            done = "left out" if self._drops else "cut there"
            tokens = int(self._long.sum()) + (limit * len(self._long) if self._drops else 0)
            verb = "is" if len(self._long) == 1 else "are"
            notes.append(
                f"{number_of(len(self._long), 'document')} of more than "
                f"{number_of(limit, 'token')} {verb} {done}, with {tokens} tokens "
                "(data.long_documents)"
            )
        return notes
