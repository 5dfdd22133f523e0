"""The factor of all gradients, clip coefficient / loss scale, and when memory is multiplied by it.

Multiplying all gradients is a pass over memory that some AdamW kernels save: they multiply each
gradient as they read it for the update (`AdamWPlan.takes_factor`). Gradients for such a kernel are
`scaled_in_update`: in memory they stay without the factor, which is kept as `pending_factor` and
applied only if somebody reads them after the step. All others, Muon's too, are `scaled_now`.

Computes no factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GradFactor:
    """Two lists of gradients, and the factor that the second is still to be multiplied by."""

    def __init__(self, scaled_now: Sequence[Tensor], scaled_in_update: Sequence[Tensor]) -> None:
        self._scaled_now, self._scaled_in_update = list(scaled_now), list(scaled_in_update)
        self.pending_factor = 1.0

    def scale(self, factor: float) -> None:
        """Multiply the gradients that are scaled now; for the others the factor is pending."""
        _multiply(self._scaled_now, factor)
        if self._scaled_in_update:
            self.pending_factor *= factor

    def apply_pending(self) -> None:
        """Multiply the gradients that are scaled in the update, so that memory holds the result."""
        _multiply(self._scaled_in_update, self.pending_factor)
        self.pending_factor = 1.0

    def clear(self) -> None:
        """Forget the pending factor: all gradients were zeroed or will be overwritten."""
        self.pending_factor = 1.0


@torch.no_grad()
def _multiply(grads: Sequence[Tensor], factor: float) -> None:
    if factor != 1.0:
        for grad in grads:
            grad.mul_(factor)
