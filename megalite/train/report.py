"""A finished run in a page: losses, where the time of a step went, and the loss curve as a PNG.

Reads only metrics.jsonl. Knows no torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megalite.errors import DataError
from megalite.train.records import TIME_PARTS, read_metrics

_MEANING = {
    "compute": "forward and backward arithmetic",
    "tp_comm": "waiting in tensor-parallel collectives",
    "pp_wait": "waiting for other pipeline stages (the bubble)",
    "dp_comm": "waiting for gradient and weight collectives",
    "data": "reading tokens",
    "optimizer": "clipping and AdamW",
    "other": "metrics, agreement between ranks, the rest",
}


def last_steps(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """(step lines, eval lines, run line) of a run; what a later attempt did again or undid is out.

    A loss that was not finite is a float again. Raises DataError for a folder without steps.
    """
    lines = read_metrics(run / "metrics.jsonl")
    head = next((line for line in lines if line["kind"] == "run"), None)
    steps: dict[int, dict[str, Any]] = {}
    evals: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line["kind"] == "restart":
            for kept in (steps, evals):
                for step in [step for step in kept if step > line["step"]]:
                    del kept[step]
        elif line["kind"] in ("step", "eval"):
            kept = steps if line["kind"] == "step" else evals
            kept[line["step"]] = {**line, "loss": float(line["loss"])}
    if head is None or not steps:
        raise DataError(
            f"{run / 'metrics.jsonl'} {'has no steps' if run.is_dir() else 'does not exist'}; "
            "give the folder of a run that has trained"
        )
    return [steps[s] for s in sorted(steps)], [evals[s] for s in sorted(evals)], head


def summary(run: Path) -> list[str]:
    """What to know of a run, line by line."""
    steps, evals, head = last_steps(run)
    vocab = head["config"]["model"]["vocab_size"]
    lines = [
        f"{len(steps)} steps, {steps[-1]['consumed_tokens'] / 1e6:.2f}M tokens, "
        f"{head['parameters'] / 1e6:.2f}M parameters",
        f"training loss   {steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}",
    ]
    if evals:
        lines.append(f"validation loss {evals[0]['loss']:.4f} -> {evals[-1]['loss']:.4f}")
    lines.append(f"guessing among {vocab} tokens would be ln({vocab}) = {math.log(vocab):.4f}")
    return lines


def time_table(run: Path) -> list[str]:
    """Where the time of a median step went, mean over ranks; the first step is left out."""
    steps, _, _ = last_steps(run)
    steady = steps[1:] or steps
    wall_s = fmean(line["step_time_s"] for line in steady)
    rows = [f"a step took {median(line['step_time_s'] for line in steady) * 1e3:.0f} ms (median):"]
    for part in TIME_PARTS:
        seconds = fmean(line[f"time_{part}_s"] for line in steady)
        rows.append(f"  {part:<10}{seconds / wall_s:7.1%}   {_MEANING[part]}")
    return rows


def draw_losses(run: Path, out: Path) -> Path:
    """Write the loss curve (training, validation, log axis where it helps) to `out` as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, evals, head = last_steps(run)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([s["step"] for s in steps], [s["loss"] for s in steps], lw=1, label="training")
    if evals:
        axes.plot([e["step"] for e in evals], [e["loss"] for e in evals], "o-", label="validation")
    vocab = head["config"]["model"]["vocab_size"]
    axes.axhline(math.log(vocab), color="grey", ls=":", lw=1, label=f"ln({vocab}): guessing")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=run.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out)
    return out
