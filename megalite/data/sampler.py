"""The order of samples: a pure function of (number of samples, seed, position), O(1) to seek.

Position g of the run (g = step * global_batch + place in the step) is place g % N of epoch g // N.
Each epoch has its own keyed permutation of 0 .. N - 1: an eight-round Feistel network over the next
even power of two (Luby and Rackoff 1988), re-applied until it lands inside N ("cycle walking",
Black and Rogaway 2002; under four applications on average for N above 16). Nothing is built or
saved, and only the last block of places is kept; the order does not depend on the length of the
run, the layout or restarts. Needs no data and no torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megalite.errors import ConfigError, DataError

NUM_ROUNDS = 8
BLOCK = 1024  # places evaluated at a time: a network over few costs as much as over many
MIN_BITS = 6  # fewer would leave small sets with too few distinct orders
MASK_64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """Scramble 64 bits (the finalizer of splitmix64: Steele, Lea and Flood 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK_64
    return value ^ (value >> 31)


def _mix64_array(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Permutation:
    """A keyed permutation of 0 .. size - 1, evaluated at any places on demand."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        assert 1 <= size < 2**62
        assert 0 <= epoch < 2**64
        self.size = size
        bits = max(MIN_BITS, (size - 1).bit_length())
        self._half = np.uint64((bits + 1) // 2)
        self._mask = np.uint64((1 << ((bits + 1) // 2)) - 1)
        key = mix64((mix64((seed + GOLDEN) & MASK_64) + epoch * GOLDEN) & MASK_64)
        self._keys = [np.uint64(mix64((key + n * GOLDEN) & MASK_64)) for n in range(NUM_ROUNDS)]

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Values at `places` [n], each in 0 .. size - 1; vectorised."""
        # A place outside could walk for ever: its cycle need not contain a value below `size`.
        assert places.size == 0 or 0 <= places.min() <= places.max() < self.size
        values = self._network(places.astype(np.uint64))
        # Cycle walking: the network permutes a power of two, so values beyond `size` go in again.
        outside = np.flatnonzero(values >= np.uint64(self.size))
        while outside.size:
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= np.uint64(self.size)]
        return values.astype(np.int64)

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix64_array(right ^ key) & self._mask)
        return (left << self._half) | right


class SampleOrder:
    """The sample at each position of a run; without `shuffle` in order, epoch after epoch.

    A batch that crosses the end of an epoch takes its rest from the next one: no sample is left
    out, repeated within an epoch, or padded, whatever the batch size. Raises DataError for a number
    of samples out of range, ConfigError for such a seed.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool = True) -> None:
        if not 1 <= num_samples < 2**62:
            raise DataError(f"num_samples={num_samples}; an order needs 1 to 2**62 - 1 samples")
        if not 0 <= seed < 2**64:
            raise ConfigError(f"seed={seed}; must be 0 to 2**64 - 1")
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self._block: tuple[int, int, NDArray[np.int64]] | None = None  # epoch, first place, values

    def at(self, first: int, count: int) -> NDArray[np.int64]:
        """Sample ids at positions first .. first + count - 1 of the run."""
        assert count >= 0
        if not 0 <= first < 2**63 - count:
            raise ConfigError(f"position {first} of the run; must be 0 to 2**63 - 1")
        parts = []
        while count > 0:
            epoch, place = divmod(first, self.num_samples)
            taken = min(count, self.num_samples - place)
            parts.append(self._epoch_slice(epoch, place, taken))
            first, count = first + taken, count - taken
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _epoch_slice(self, epoch: int, place: int, count: int) -> NDArray[np.int64]:
        if not self.shuffle or self.num_samples == 1:
            return np.arange(place, place + count, dtype=np.int64)
        first = place // BLOCK * BLOCK
        parts = [
            self._values(epoch, start)[max(0, place - start) : place + count - start]
            for start in range(first, place + count, BLOCK)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _values(self, epoch: int, first: int) -> NDArray[np.int64]:
        """Sample ids of the block of places that starts at `first`; safe for threads."""
        block = self._block
        if block is None or block[:2] != (epoch, first):
            stop = min(first + BLOCK, self.num_samples)
            places = np.arange(first, stop, dtype=np.int64)
            values = Permutation(self.num_samples, self.seed, epoch).at(places)
            self._block = block = (epoch, first, values)
        return block[2]
