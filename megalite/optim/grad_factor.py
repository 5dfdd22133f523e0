"""The factor of all gradients, clip coefficient over loss scale, applied once and where needed.

Some updates multiply gradients as they read them; then the gradients in memory are only multiplied
when somebody asks to see them. Decides no factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GradFactor:
    """`eager` gradients are multiplied at once, `lazy` ones when `settle` is called."""

    def __init__(self, eager: Sequence[Tensor], lazy: Sequence[Tensor]) -> None:
        self._eager, self._lazy = list(eager), list(lazy)
        self.owed = 1.0  # what the lazy gradients are yet to be multiplied by

    def apply(self, factor: float) -> None:
        """Multiply all gradients, the lazy ones on paper."""
        _multiply(self._eager, factor)
        if self._lazy:
            self.owed *= factor

    def settle(self) -> None:
        """Multiply the lazy gradients by what they are owed."""
        _multiply(self._lazy, self.owed)
        self.owed = 1.0

    def clear(self) -> None:
        """Gradients were zeroed, or will be overwritten."""
        self.owed = 1.0


@torch.no_grad()
def _multiply(grads: Sequence[Tensor], factor: float) -> None:
    if factor != 1.0:
        for grad in grads:
            grad.mul_(factor)
