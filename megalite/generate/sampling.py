"""The choice of the next token: greedy, or drawn at a temperature from the likeliest ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """A rule for choosing tokens. temperature 0 takes the likeliest token each time.

    Of the ids, first the `top_k` likeliest are kept (0: all), then the fewest likeliest whose
    probabilities add up to `top_p` (1: all). The same seed gives the same choices. Raises
    ConfigError, all problems at once, for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            problems.append(f"temperature={self.temperature:g} needs to be a number of at least 0")
        if self.top_k < 0:
            problems.append(f"top_k={self.top_k} needs to be at least 0; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p:g} needs to be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            problems.append(f"seed={self.seed} needs to be from 0 to 2^63 - 1")
        if problems:
            raise ConfigError(problems)

    def generator(self) -> torch.Generator:
        """A source of draws for one text, with this seed."""
        return torch.Generator().manual_seed(self.seed)

    def pick(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Choose an id, from the logits of the ids that may be chosen."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        probabilities = self.probabilities(logits_V.cpu())
        return int(torch.multinomial(probabilities, 1, generator=generator))

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Probability of each id, float64 [V]: 0 for ids that are not kept.

        The temperature must be above 0.
        """
        scaled = (logits_V.double() - logits_V.max().double()) / self.temperature
        likeliest, order = scaled.softmax(0).sort(descending=True, stable=True)
        if 0 < self.top_k < len(likeliest):
            likeliest[self.top_k :] = 0
            likeliest /= likeliest.sum()
        if self.top_p < 1:
            before = likeliest.cumsum(0) - likeliest
            likeliest[before >= self.top_p] = 0  # never the first: `before` is 0 there
        kept = torch.zeros_like(likeliest)
        kept[order] = likeliest
        return kept / kept.sum()
