"""The report of a finished run: losses, the time of a step by part, the loss curve as a PNG.

Reads only metrics.jsonl, however damaged; lines that it cannot use it counts. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megalite.errors import DataError
from megalite.record.records import TIME_PARTS, Lines, read_lines

_MEANING = {
    "compute": "forward and backward arithmetic",
    "tp_comm": "waiting in tensor-parallel collectives",
    "pp_wait": "waiting for other pipeline stages (the bubble)",
    "dp_comm": "waiting for gradient and weight collectives",
    "data": "reading tokens",
    "optimizer": "clipping and the update",
    "other": "metrics, agreement between ranks, the rest",
}


@dataclass(frozen=True)
class RunRecord:
    """A run's metrics, without the lines that a later attempt repeated or rolled back."""

    head: dict[str, Any]  # the run line
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    damage: str | None  # lines that cannot be used, in a sentence


def read_run(run: Path) -> RunRecord:
    """Read a run folder's metrics; a loss that was not finite is a float again.

    Raises DataError for a folder without a run line or without steps.
    """
    lines = read_lines(run / "metrics.jsonl")
    head = next((line for line in lines.sound if line["kind"] == "run"), None)
    steps: dict[int, dict[str, Any]] = {}
    evals: dict[tuple[int, str], dict[str, Any]] = {}
    for line in lines.sound:
        if line["kind"] == "restart":
            # The attempt goes on after this step: later lines belong to what was rolled back.
            steps = {step: kept for step, kept in steps.items() if step <= line["step"]}
            evals = {key: kept for key, kept in evals.items() if key[0] <= line["step"]}
        elif line["kind"] == "step":
            steps[line["step"]] = {**line, "loss": float(line["loss"])}
        elif line["kind"] == "eval":
            name = str(line.get("name", "validation"))
            evals[line["step"], name] = {**line, "name": name, "loss": float(line["loss"])}
    if head is None or not steps:
        raise DataError(_nothing_to_report(run, lines))
    return RunRecord(
        head, [steps[s] for s in sorted(steps)], [evals[k] for k in sorted(evals)], lines.damage()
    )


def _nothing_to_report(run: Path, lines: Lines) -> str:
    path = run / "metrics.jsonl"
    if not path.is_file():
        what = "does not exist"
    elif any(line["kind"] == "step" for line in lines.sound):
        what = "has no run line, with which a run begins"
    else:
        what = "has no steps"
    damage = lines.damage()
    return (
        f"{path} {what}{f' ({damage})' if damage else ''}; give the folder of a run that has "
        "trained"
    )


def vocab_size(record: RunRecord) -> int | None:
    """The model's vocabulary size; None if the run line does not have it."""
    model = record.head.get("config", {}).get("model")
    size = model.get("vocab_size") if isinstance(model, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def summary(record: RunRecord) -> list[str]:
    """The lines about a run's length, size and losses."""
    steps, parameters = record.steps, record.head.get("parameters")
    tokens = steps[-1].get("consumed_tokens")
    count = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
    lines = [
        f"{count}, {_short(tokens)} tokens, {_short(parameters)} parameters",
        f"training loss   {steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}",
    ]
    names = list(dict.fromkeys(line["name"] for line in record.evals))
    width = max([16, *(len(f"{name} loss ") for name in names)])
    for name in names:
        named = [line["loss"] for line in record.evals if line["name"] == name]
        lines.append(f"{name} loss".ljust(width) + f"{named[0]:.4f} -> {named[-1]:.4f}")
    vocab = vocab_size(record)
    if vocab is not None:
        lines.append(f"guessing among {vocab} tokens would be ln({vocab}) = {math.log(vocab):.4f}")
    if record.damage is not None:
        lines.append(f"warning: {record.damage}")
    return lines


def time_table(record: RunRecord) -> list[str]:
    """Lines with the mean time of each part of a step, mean over ranks, without the first step.

    Of the last attempt that trained: an earlier one may have had another layout or other machines.
    """
    names = ["step_time_s", *(f"time_{part}_s" for part in TIME_PARTS)]
    attempt = record.steps[-1].get("attempt", 1)
    timed = [
        line
        for line in record.steps
        if line.get("attempt", 1) == attempt and all(_is_usable_time(line.get(n), n) for n in names)
    ]
    steady = timed[1:] or timed
    if not steady:
        return ["no step has its time split"]
    wall_s = fmean(line["step_time_s"] for line in steady)
    took_ms = median(line["step_time_s"] for line in steady) * 1e3
    rows = [f"a step took {took_ms:.0f} ms (median of attempt {attempt}):"]
    for part in TIME_PARTS:
        seconds = fmean(line[f"time_{part}_s"] for line in steady)
        rows.append(f"  {part:<10}{seconds / wall_s:7.1%}   {_MEANING[part]}")
    return rows


def _short(count: int | None) -> str:
    """A count in millions, or in full below 10,000, where millions would show little."""
    if count is None:
        return "n/a"
    return f"{count / 1e6:.2f}M" if count >= 10_000 else str(count)


def _is_usable_time(value: Any, name: str) -> bool:
    """True if a time can be shown: a part of a step may take 0 s, the whole step may not."""
    if not isinstance(value, (int, float)):
        return False
    return value > 0 if name == "step_time_s" else value >= 0


def draw_losses(record: RunRecord, title: str, out: Path) -> Path:
    """Write the losses by step (training, validation, uniform guessing) to `out` as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = record.steps
    axes.plot([s["step"] for s in steps], [s["loss"] for s in steps], lw=1, label="training")
    for name in dict.fromkeys(line["name"] for line in record.evals):
        named = [line for line in record.evals if line["name"] == name]
        axes.plot([e["step"] for e in named], [e["loss"] for e in named], "o-", label=name)
    vocab = vocab_size(record)
    if vocab is not None:
        axes.axhline(math.log(vocab), color="grey", ls=":", lw=1, label=f"ln({vocab}): guessing")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out)
    return out
