"""The report of a finished run, or of several: losses, the time of a step by part.

Reads only metrics.jsonl, however damaged; lines that it cannot use it counts. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megalite.errors import DataError
from megalite.record.records import TIME_PARTS, Lines, read_lines
from megalite.wording import number_of

_MEANING = {
    "compute": "forward and backward arithmetic",
    "tp_comm": "waiting in tensor-parallel collectives",
    "pp_wait": "waiting for other pipeline stages (the bubble)",
    "dp_comm": "waiting for gradient and weight collectives",
    "data": "reading tokens",
    "optimizer": "clipping and the update",
    "other": "metrics, agreement between ranks, the rest",
}


_LARGE = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


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


def eval_names(*records: RunRecord) -> list[str]:
    """The names of the validation sets of runs, each once."""
    return list(dict.fromkeys(line["name"] for record in records for line in record.evals))


def figures(record: RunRecord) -> dict[str, Any]:
    """The values that a report prints, from which its lines are made.

    Times are of the last attempt that trained, without its first step: an earlier one may have had
    another layout or other machines. step_time_s is a median; time_shares, by part, are of the mean
    over the steps that have their time split, and empty where none has. None stands for what the
    run's file does not have.
    """
    attempt, steady = _timed_steps(record)
    names = [f"time_{part}_s" for part in TIME_PARTS]
    split = [line for line in steady if all(_is_usable_time(line.get(n), n) for n in names)]
    split_s = sum(line["step_time_s"] for line in split)
    vocab = vocab_size(record)
    return {
        "steps": len(record.steps),
        "consumed_tokens": record.steps[-1].get("consumed_tokens"),
        "parameters": record.head.get("parameters"),
        "loss": _ends(record.steps),
        "evaluations": {
            name: _ends([line for line in record.evals if line["name"] == name])
            for name in eval_names(record)
        },
        "vocab_size": vocab,
        "guessing_loss": None if vocab is None else math.log(vocab),
        "attempt": attempt,
        "step_time_s": median(line["step_time_s"] for line in steady) if steady else None,
        "time_shares": {
            part: sum(line[f"time_{part}_s"] for line in split) / split_s
            for part in TIME_PARTS
            if split
        },
        "damage": record.damage,
    }


def _ends(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The number of some losses, with the first and the last."""
    return {"count": len(lines), "first": lines[0]["loss"], "last": lines[-1]["loss"]}


def summary(record: RunRecord) -> list[str]:
    """The lines about a run's length, size and losses."""
    found = figures(record)
    steps, vocab, evaluations = found["steps"], found["vocab_size"], found["evaluations"]
    tokens, parameters = map(short_count, (found["consumed_tokens"], found["parameters"]))
    count = number_of(steps, "step")
    lines = [
        f"{count}, {tokens} tokens, {parameters} parameters",
        "training loss   " + _change(found["loss"]),
    ]
    width = max([16, *(len(f"{name} loss ") for name in evaluations)])
    lines += [f"{name} loss".ljust(width) + _change(ends) for name, ends in evaluations.items()]
    if vocab is not None:
        guess = f"{found['guessing_loss']:.4f}"
        lines.append(f"guessing among {number_of(vocab, 'token')} would be ln({vocab}) = {guess}")
    if record.damage is not None:
        lines.append(f"warning: {record.damage}")
    return lines


def _change(ends: Mapping[str, Any]) -> str:
    """The first and the last of some losses, or the only one."""
    first, last = f"{ends['first']:.4f}", f"{ends['last']:.4f}"
    return first if ends["count"] == 1 else f"{first} -> {last}"


def time_table(record: RunRecord) -> list[str]:
    """Lines with the mean time of each part of a step, mean over ranks, as `figures` has it."""
    found = figures(record)
    if found["step_time_s"] is None:
        return ["no step has its time split"]
    took_ms = found["step_time_s"] * 1e3
    rows = [f"a step took {took_ms:.0f} ms (median of attempt {found['attempt']}):"]
    if not found["time_shares"]:
        rows.append("  no step has its time split")
    for part, share in found["time_shares"].items():
        rows.append(f"  {part:<10}{share:7.1%}   {_MEANING[part]}")
    return rows


def comparison(runs: Mapping[str, RunRecord]) -> list[str]:
    """The lines of a table of runs by name: sizes, last losses, median time of a step."""
    kinds = eval_names(*runs.values())
    rows = [["run", "steps", "tokens", "parameters", "training", *kinds, "ms a step"]]
    for name, record in runs.items():
        found = figures(record)
        took_s, evaluations = found["step_time_s"], found["evaluations"]
        sizes = map(short_count, (found["consumed_tokens"], found["parameters"]))
        ends = [found["loss"], *map(evaluations.get, kinds)]
        losses = [f"{one['last']:.4f}" if one else "n/a" for one in ends]
        took = "n/a" if took_s is None else f"{took_s * 1e3:.0f}"
        rows.append([name, str(found["steps"]), *sizes, *losses, took])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]))
    damaged = [(name, record.damage) for name, record in runs.items() if record.damage]
    return [*lines, *(f"warning: {name}: {damage}" for name, damage in damaged)]


def _timed_steps(record: RunRecord) -> tuple[int, list[dict[str, Any]]]:
    """The last attempt and those of its steps that have their time, without the first."""
    attempt = record.steps[-1].get("attempt", 1)
    timed = [
        line
        for line in record.steps
        if line.get("attempt", 1) == attempt
        and _is_usable_time(line.get("step_time_s"), "step_time_s")
    ]
    return attempt, timed[1:] or timed


def short_count(count: int | None) -> str:
    """A count to three digits with k, M, B or T; in full below 10,000; n/a for None."""
    if count is None:
        return "n/a"
    if count < 10_000:
        return str(count)
    size, letter = next(one for one in _LARGE if count >= one[0])
    return f"{float(f'{count / size:.3g}'):g}{letter}"


def _is_usable_time(value: Any, name: str) -> bool:
    """True if a time can be shown: a part of a step may take 0 s, the whole step may not."""
    if not isinstance(value, (int, float)):
        return False
    return value > 0 if name == "step_time_s" else value >= 0
