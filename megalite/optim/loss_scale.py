"""Dynamic loss scaling for float16: the scale of the gradients, and when it changes.

Small gradients vanish in float16, so the loss's gradient is multiplied by a scale before backward
and the weights' gradients divided by it afterwards (Micikevicius et al., "Mixed Precision
Training"). A step whose gradients are not finite is skipped; after `hysteresis` such steps the
scale backs off. After `interval` good steps in a row it grows again, and hysteresis starts anew.
Every rank decides from the global norm, so all ranks have the same scale. Touches no tensors.
"""

from __future__ import annotations

from megalite.config import OptimizerConfig

_MAX_SCALE = 2.0**64  # magnified gradients are summed in fp32, whose largest value is 2^128


class LossScaler:
    """The scale, and the two counters that decide when it changes; always 1 unless `enabled`."""

    def __init__(self, config: OptimizerConfig, enabled: bool) -> None:
        self._config, self.enabled = config, enabled
        self.scale = config.loss_scale if enabled else 1.0
        self._good_steps = 0  # in a row
        self._hysteresis = config.loss_scale_hysteresis  # bad steps left before backing off

    def good_step(self) -> None:
        """Count a step whose gradients were finite."""
        if not self.enabled:
            return
        self._good_steps += 1
        if self._good_steps == self._config.loss_scale_interval:
            self._good_steps = 0
            self._hysteresis = self._config.loss_scale_hysteresis
            self.scale = min(self.scale / self._config.loss_scale_backoff, _MAX_SCALE)

    def bad_step(self) -> bool:
        """Count a step whose gradients were not finite; True if a smaller scale may help."""
        if not self.enabled or self.scale <= self._config.loss_scale_min:
            return False
        self._good_steps = 0
        self._hysteresis -= 1
        if self._hysteresis <= 0:
            smaller = self.scale * self._config.loss_scale_backoff
            self.scale = max(smaller, self._config.loss_scale_min)
        return True

    def state(self) -> dict[str, float]:
        """The scale and its counters, for a checkpoint; empty unless enabled."""
        if not self.enabled:
            return {}
        return {
            "loss_scale": self.scale,
            "loss_scale_good_steps": self._good_steps,
            "loss_scale_hysteresis": self._hysteresis,
        }

    def load(self, state: dict[str, float]) -> None:
        """Restore the values that `state` returned; a run of another type had none."""
        if self.enabled and state.keys() >= self.state().keys():
            self.scale = state["loss_scale"]
            self._good_steps = int(state["loss_scale_good_steps"])
            self._hysteresis = int(state["loss_scale_hysteresis"])
