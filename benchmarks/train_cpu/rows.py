"""From the seconds of interleaved rounds to result rows, JSON lines and the table.

Pure arithmetic and formatting; the definitions of all figures are in benchmarks/README.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.products import ProductTimes
from benchmarks.train_cpu.setup import GLOBAL_BATCH, MODEL, SEQ_LENGTH, STEP_TOKENS
from benchmarks.train_cpu.workers import Memory, StepTime
from megalite.run.model_math import mfu, training_flops


@dataclass
class Rounds:
    """What one contender did: an entry per round in each list."""

    name: str
    micro_batch: int
    num_processes: int = 1
    step_s: list[float] = field(default_factory=list)  # of the slowest rank
    cpu_s: list[float] = field(default_factory=list)  # processor time of all ranks
    reference_s: list[float] = field(default_factory=list)  # transformers around that step
    products: list[ProductTimes] = field(default_factory=list)
    loss: float = 0.0
    memory: list[Memory] = field(default_factory=list)  # by rank

    def add(self, step: StepTime, products: ProductTimes, reference_s: float) -> None:
        """One more round."""
        self.step_s.append(step.seconds)
        self.cpu_s.append(step.cpu_s)
        self.loss = step.loss
        self.products.append(products)
        self.reference_s.append(reference_s)

    @property
    def micro_tokens(self) -> int:
        return self.micro_batch * SEQ_LENGTH

    @property
    def num_cores(self) -> int:
        """Cores that the processes can keep busy: more processes than cores share them."""
        return min(self.num_processes, len(os.sched_getaffinity(0)))


def row_of(rounds: Rounds) -> dict[str, Any]:
    """The figures of one contender: medians over rounds of what is formed within each round."""
    ratios = [r / s for r, s in zip(rounds.reference_s, rounds.step_s, strict=True)]
    peaks = [m.peak_bytes for m in rounds.memory]
    return {
        "layout": rounds.name,
        "processes": rounds.num_processes,
        "cores": rounds.num_cores,
        "micro_batch": rounds.micro_batch,
        "rounds": len(rounds.step_s),
        "step_s": median(rounds.step_s),
        "step_s_min": min(rounds.step_s),
        "step_s_max": max(rounds.step_s),
        "cpu_s": median(rounds.cpu_s),
        "tokens_per_s": STEP_TOKENS / median(rounds.step_s),
        "ratio_to_transformers": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "peak_memory_bytes": max(peaks),
        "peak_memory_all_ranks_bytes": sum(peaks),
        "peak_resident_bytes": max(m.peak_resident_bytes for m in rounds.memory),
        **_utilisation(rounds),
        "loss": rounds.loss,
    }


def _utilisation(rounds: Rounds) -> dict[str, float]:
    flops = training_flops(MODEL, SEQ_LENGTH).matmul_weights
    num_micro = STEP_TOKENS / rounds.micro_tokens
    rates, shares, causal, full = [], [], [], []
    for seconds, products in zip(rounds.step_s, rounds.products, strict=True):
        rate = flops * rounds.micro_tokens / products.weights_s
        used = mfu(STEP_TOKENS / seconds, MODEL, SEQ_LENGTH, rate / 1e12, rounds.num_cores)
        assert used is not None
        least_s = num_micro * (products.weights_s + products.attention_s) / rounds.num_cores
        rates.append(rate)
        causal.append(used.causal)
        full.append(used.full)
        shares.append(
            (num_micro * products.weights_s / rounds.num_cores / seconds, least_s / seconds)
        )
    return {
        "matmul_flops_per_s": median(rates),
        "mfu_causal": median(causal),
        "mfu_full": median(full),
        "matmul_fraction": median(weights for weights, _ in shares),
        "matmul_attention_fraction": median(both for _, both in shares),
    }


def setting() -> dict[str, Any]:
    """What is trained: the same for every row."""
    return {
        "model": MODEL.model_dump(exclude_none=True),
        "seq_length": SEQ_LENGTH,
        "global_batch": GLOBAL_BATCH,
    }


_COLUMNS = (
    ("layout", "layout", "{}"),
    ("procs", "processes", "{}"),
    ("micro", "micro_batch", "{}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("vs HF", "ratio_to_transformers", "{:.2f}"),
    ("min", "ratio_min", "{:.2f}"),
    ("max", "ratio_max", "{:.2f}"),
    ("MiB/rank", "peak_memory_bytes", "{:.0f}"),
    ("GFLOP/s", "matmul_flops_per_s", "{:.1f}"),
    ("MFU causal", "mfu_causal", "{:.1%}"),
    ("MFU full", "mfu_full", "{:.1%}"),
    ("products", "matmul_fraction", "{:.1%}"),
    ("+attention", "matmul_attention_fraction", "{:.1%}"),
)
_SCALE = {"peak_memory_bytes": 2.0**-20, "matmul_flops_per_s": 1e-9}

LEGEND = """\
vs HF: tokens/s over those of transformers around the same step; median, min, max of the rounds.
MiB/rank: peak resident memory above that before the model was built, on the largest rank.
GFLOP/s: one thread multiplying the model's own weight matrices, at this micro batch, in this run.
MFU: model FLOPs/s over that rate x cores in use; causal counts half of the scores, full all.
products: time of those products alone / step time. +attention: with QK^T, PV and gradients, S x S.
"""


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    cells = [[title for title, _, _ in _COLUMNS]]
    cells += [
        [
            form.format(row[key] * _SCALE[key] if key in _SCALE else row[key])
            for _, key, form in _COLUMNS
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
