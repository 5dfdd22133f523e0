"""The policy for steps whose gradients are not finite or too large: skip and count, or end the run.

In float16 the loss scale is lowered first; only where it cannot get smaller do the settings
`non_finite` and `max_skips` decide, as they do in every other type.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megalite.config import OptimizerConfig
from megalite.optim.loss_scale import LossScaler
from megalite.optim.norm import GradNorm, NonFiniteGradientError
from megalite.optim.shard import Piece
from megalite.wording import number_of

_NAMED = 4


class SkipPolicy:
    """Skip or stop; `num_skips` counts the steps in a row that `non_finite = "skip"` skipped."""

    def __init__(self, config: OptimizerConfig, scaler: LossScaler) -> None:
        self._config, self._scaler = config, scaler
        self.num_skips = 0

    def good_step(self) -> None:
        """Count a step whose gradients were finite."""
        self.num_skips = 0
        self._scaler.good_step()

    def skip_or_stop(self, norm: GradNorm, num_updates: int, pieces: Sequence[Piece]) -> None:
        """Count a skipped step, or raise NonFiniteGradientError with the parameters at fault.

        `num_updates`: updates applied before this one.
        """
        if self._scaler.bad_step():
            return
        skipping = self._config.non_finite == "skip"
        if skipping and self.num_skips < self._config.max_skips:
            self.num_skips += 1
            return

        # The run ends here, so the message has all that is known of the cause.
        names = ", ".join(_non_finite_names(pieces)) or "none"
        ranks = number_of(norm.num_bad_ranks, "rank")
        fault = f"not finite: norm {norm.value}, on {ranks} (here: {names})"
        if norm.finite:
            dtype = str(pieces[0].grad.dtype).removeprefix("torch.")
            fault = f"too large: their norm of {norm.value:g} has no square in {dtype}"
        can_clip = norm.finite and self._config.clip_grad is None
        scaler = self._scaler
        raise NonFiniteGradientError(
            f"gradients of update {num_updates + 1} are {fault}"
            + (f", at the smallest loss scale {scaler.scale:g}" if scaler.enabled else "")
            + (f", after {number_of(self.num_skips, 'skipped step')} in a row" if skipping else "")
            + "; weights and optimizer state are as before this update. Lower optimizer.lr, check "
            + ("the data, set optimizer.clip_grad, or " if can_clip else "the data, or ")
            + ("raise optimizer.max_skips" if skipping else 'set optimizer.non_finite = "skip"')
        )

    def state(self) -> dict[str, float]:
        """The count of skips, for a checkpoint."""
        return {"num_skips": self.num_skips}

    def load(self, state: dict[str, float]) -> None:
        """Restore the values that `state` returned."""
        self.num_skips = int(state["num_skips"])


def _non_finite_names(pieces: Sequence[Piece]) -> list[str]:
    """Names of the first parameters whose owned gradients are not finite."""
    bad = [piece.spec.name for piece in pieces if not bool(torch.isfinite(piece.grad).all())]
    return bad[:_NAMED]
