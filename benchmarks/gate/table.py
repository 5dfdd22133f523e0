"""What gpu_gate prints last: rates beside their marks, correctness, training. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

# kind of a case, or a figure of training -> (field, least value that passes)
MARKS = {
    "elementwise": ("fraction", 0.85),  # of the rate of a copy
    "norm backward": ("fraction", 0.70),
    "adamw": ("fraction", 0.85),
    "loss": ("fraction", 0.80),
    "attention forward 128": ("tflop_per_s", 450.0),
    "attention backward 128": ("tflop_per_s", 320.0),
    "grouped product": ("fraction", 0.60),  # of the rate of one large product
}
MFU_MARK = 0.50
# parts that say whether something is right: a wrong row fails the gate
CHECKS = ("gradients", "losses", "nccl", "correctness")
# Host time of a layer's forward and backward in one microbatch, in ms: the 1B model at 4096 tokens
# is estimated to keep a H100 busy for 2.5 ms a layer, and the host must be ahead of it.
LAYER_BUDGET_MS = 2.0


def passed(row: Row) -> bool | None:
    """Whether a row of rates reaches its mark; None where it has none or no figure."""
    field, least = MARKS.get(row.get("kind", ""), ("", 0.0))
    value = row.get(field)
    return None if value is None else bool(value >= least)


def verdict(reached: bool | None, dry: bool) -> str:
    return "-" if reached is None or dry else ("PASS" if reached else "MISS")


def failures(rows: Sequence[Row]) -> list[Row]:
    """Rows that say something is wrong, or that the check of it broke."""
    return [row for row in rows if row.get("correct") is False]


def summary(rows: Sequence[Row], dry: bool) -> str:
    """The table and what is to be said beneath it."""
    return "\n".join(
        [*_rates(rows, dry), *_training(rows, dry), *_correct(rows), *_rest(rows, dry)]
    )


def _rates(rows: Sequence[Row], dry: bool) -> Iterator[str]:
    ceilings = next((row for row in rows if "copy_tb_per_s" in row), None)
    if ceilings:
        yield (
            f"ceilings: copy {ceilings['copy_tb_per_s']:.3g} TB/s, "
            f"product {ceilings['gemm_tflop_per_s']:.3g} TFLOP/s"
        )
    found = [row for row in rows if row["part"] == "rates" and "ms" in row and "rival" not in row]
    if not found:
        return
    yield "| kernel | ms | rate | of ceiling | mark | | rivals' time over ours |"
    yield "| --- | --: | --: | --: | --: | --- | --- |"
    for row in found:
        tera = "tb_per_s" if "tb_per_s" in row else "tflop_per_s"
        unit = "TB/s" if tera == "tb_per_s" else "TFLOP/s"
        field, least = MARKS.get(row["kind"], ("", 0.0))
        mark = "" if not field else (f"{least:.0%}" if field == "fraction" else f"{least:.0f}")
        share = "n/a" if row["fraction"] is None else f"{row['fraction']:.0%}"
        cells = [
            row["kernel"],
            f"{row['ms']:.3f}",
            f"{row[tera]:.4g} {unit}",
            share,
            mark,
            verdict(passed(row), dry),
            ", ".join(_rivals(rows, row["kernel"])),
        ]
        yield f"| {' | '.join(cells)} |"


def _rivals(rows: Sequence[Row], kernel: str) -> Iterator[str]:
    for row in rows:
        if row.get("kernel") == kernel and "rival" in row:
            times = row.get("ours_times_faster")
            yield f"{row['rival']} " + (f"{times:.2f}" if times else "absent")


def _training(rows: Sequence[Row], dry: bool) -> Iterator[str]:
    for row in rows:
        if row["part"] != "train" or "step_ms" not in row:
            continue
        split = ", ".join(f"{name} {ms:.1f}" for name, ms in row["split_ms"].items())
        shares = []
        for name in ("mfu", "mfu_causal"):
            value = row[name]
            reached = None if value is None else value >= MFU_MARK
            text = "n/a" if value is None else f"{value:.1%}"
            shares.append(f"{name} {text} {verdict(reached, dry)}")
        yield (
            f"training, sequence {row['seq_length']}, {row['backend']}: {row['step_ms']:.1f} ms "
            f"({split}), {row['tokens_per_s']:.0f} tokens/s, {', '.join(shares)} (mark "
            f"{MFU_MARK:.0%}), peak {row['memory_peak_bytes'] / 2**30:.1f} "
            f"GiB, planned {row['memory_planned_bytes'] / 2**30:.1f}"
        )


def _correct(rows: Sequence[Row]) -> Iterator[str]:
    """A line a part that checks, and one a wrong row."""
    for part in CHECKS:
        checked = [row for row in rows if row["part"] == part and "correct" in row]
        if not checked:
            continue
        wrong = failures(checked)
        worst = max((row.get("error_over_bound", 0.0) for row in checked), default=0.0)
        yield (
            f"{part}: {len(checked) - len(wrong)} of {len(checked)} right, worst error "
            f"{worst:.2f} of its bound {'FAIL' if wrong else 'PASS'}"
        )
        for row in wrong:
            what = row.get("error") or "; ".join(row.get("faults", ()))
            named = (row.get("kernel"), row.get("shape"), row.get("dtype"))
            yield f"  wrong: {' '.join(str(name) for name in named if name is not None)}: {what}"


def _rest(rows: Sequence[Row], dry: bool) -> Iterator[str]:
    for row in rows:
        if "layer_ms" in row:
            reached = row["layer_ms"] <= row["budget_ms"]
            yield (
                f"launches of a layer: {row['layer_ms']:.2f} ms of the host, budget "
                f"{row['budget_ms']:.1f} {verdict(reached, dry)}; {row['launches']:.1f} launches"
            )
        if "host_us" in row:
            graph = "" if row["graph_us"] is None else f", {row['graph_us']:.1f} us in a graph"
            yield f"launch of {row['kernel']}: {row['host_us']:.1f} us of the host{graph}"
    for row in rows:
        if "error" in row and row.get("correct") is not False:
            yield f"failed: {row['part']} {row.get('kernel', '')}: {row['error']}"
    for row in rows:
        if "skipped" in row:
            what = row["skipped"]
            named = ", ".join(what[:3]) + (" ..." if len(what) > 3 else "")
            yield f"skipped {len(what)} ({named}): {row['reason']}"


def layout(table: Mapping[str, Any]) -> str:
    """A table of tiles as kernels/configs/*.json has it: an entry a line."""
    blocks = []
    for kernel, entries in table["kernels"].items():
        lines = ",\n".join(f"      {json.dumps(entry)}" for entry in entries)
        blocks.append(f"    {json.dumps(kernel)}: [\n{lines}\n    ]")
    head = f'{{\n  "arch": {json.dumps(table["arch"])},\n  "kernels": {{\n'
    return head + ",\n".join(blocks) + "\n  }\n}\n"
