"""The console's line of a step: megalite's own, or one shaped as Megatron-LM's.

With `log.format = "megatron"` lines have the names and number formats that scripts for Megatron's
logs look for; there, as in Megatron, loss and time are means over the steps since the last line.
Returns lines and prints nothing; metrics.jsonl has every step.
"""

from __future__ import annotations

import math
from datetime import datetime
from statistics import fmean
from typing import Any

from megalite.config import RunConfig
from megalite.record.metrics import Device, device_memory_text
from megalite.wording import number_of


def has_line(config: RunConfig, step: int, total_steps: int) -> bool:
    """True for the steps with a line on the console."""
    return step % config.log.interval == 0 or step == total_steps


class StepLines:
    """The console's lines of a run: takes every step, returns a line each `log.interval` steps."""

    def __init__(self, config: RunConfig, device: Device, total_steps: int) -> None:
        self._config, self._device, self._total = config, device, total_steps
        self._since: list[tuple[dict[str, Any], bool]] = []  # steps since the last line

    def step(self, record: dict[str, Any], skipped: bool) -> str | None:
        """The line to print after a step, or None.

        `record` has the values of the step's line; `skipped`: its update was not applied.
        """
        self._since.append((record, skipped))
        config, step = self._config, record["step"]
        if not has_line(config, step, self._total):
            return None
        since, self._since = self._since, []
        if config.log.format == "megatron":
            return megatron_line(since, self._total)
        return step_line(record, self._total, self._device)

    def evaluation(self, step: int, name: str, loss: float, tokens: int) -> str:
        """The line of a validation set's loss after a step."""
        if self._config.log.format == "megatron":
            return (
                f" {name} loss at iteration {step} | lm loss value: {loss:.6E} | "
                f"lm loss PPL: {math.exp(min(20, loss)):.6E} | "
            )
        return (
            f"step {step:5d}/{self._total}  {name} loss {loss:.4f} over "
            f"{number_of(tokens, 'token')}"
        )


def step_line(line: dict[str, Any], total_steps: int, device: Device) -> str:
    """The line of a step in megalite's own format."""
    used = line["mfu_causal"]
    unit = "gpu" if device.is_gpu else "rank"
    parts = [
        f"step {line['step']:5d}/{total_steps}",
        f"loss {line['loss']:.4f}",
        f"gnorm {line['grad_norm']:.2f}",
        f"lr {line['lr']:.2e}",
        f"{line['step_time_s'] * 1e3:.1f} ms",
        f"{_short(line['tokens_per_s_per_gpu'])} tok/s/{unit}",
        "mfu n/a" if used is None else f"mfu {used:.1%}",
        f"mem {device_memory_text(line['memory_peak_bytes'], device)}",
        f"data {line['time_data_s'] / line['step_time_s']:.1%}",
    ]
    return "  ".join(parts)


def megatron_line(since: list[tuple[dict[str, Any], bool]], total_steps: int) -> str:
    """The line of the last step in Megatron-LM's format (`training_log` of its training loop).

    `since`: (step record, True if its update was skipped) of the steps since the last line.
    """
    last, _ = since[-1]
    losses = [record["loss"] for record, skipped in since if not skipped]
    seconds = fmean(record["step_time_s"] for record, _ in since)
    tflops = fmean(record["model_tflops_per_gpu"] for record, _ in since)
    num_nan = sum(not math.isfinite(record["loss"]) for record, _ in since)
    num_skipped = sum(skipped for _, skipped in since)

    # If all steps were skipped there is no loss to average, and the line has none.
    loss = [f"lm loss: {fmean(losses):.6E}"] if losses else []
    parts = [
        f"iteration {last['step']:8d}/{total_steps:8d}",
        f"consumed samples: {last['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {seconds * 1e3:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {tflops:.1f}",
        f"learning rate: {last['lr']:.6E}",
        f"global batch size: {last['global_batch']:5d}",
        *loss,
        f"loss scale: {last['loss_scale']:.1f}",
        f"grad norm: {last['grad_norm']:.3f}",
        f"number of skipped iterations: {num_skipped:3d}",
        f"number of nan iterations: {num_nan:3d}",
    ]
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    return f" [{now}] {' | '.join(parts)} |"


def _short(value: float) -> str:
    return f"{value / 1e3:.1f}k" if value >= 1000 else f"{value:.0f}"
