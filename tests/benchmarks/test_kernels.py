"""benchmarks/kernels.py: both sides of each pair compute the same; rows hold what is promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import kernels
from benchmarks.kernels_pairs import Pair, all_pairs, swiglu_pair


def flat(result: Any) -> list[Tensor]:
    """The tensors of a nest of tuples, in order."""
    if isinstance(result, Tensor):
        return [result]
    return [x for part in result for x in flat(part)]


TINY = kernels.SIZES["tiny"]
PAIRS = all_pairs(TINY, torch.float32, False)


@pytest.mark.parametrize(
    "pair", [*PAIRS, swiglu_pair(TINY, torch.float32, False, widened=True)], ids=lambda p: p.name
)
def test_both_sides_of_a_pair_give_the_same(pair: Pair) -> None:
    """Gradients or new weights; ours may return what its forward gives before them."""
    ours, composed = flat(pair.ours()), flat(pair.composed())
    assert composed
    if pair.name.startswith("adamw"):
        composed = [torch.cat([x.detach().flatten() for x in composed])]
    for got, want in zip(ours[-len(composed) :], composed, strict=True):
        assert torch.allclose(got.reshape(want.shape), want, atol=1e-5)


def test_rows_and_the_sum_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.jsonl"
    arguments = ["--rounds=1", "--sizes", "tiny", "--dtypes", "float32", f"--output={output}"]
    assert kernels.main(arguments) == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    by_name = {row["operation"]: row for row in rows}
    assert set(by_name) == {"norm", "swiglu", "cross_entropy", "rope", "attention", "layer_norm",
                            "gelu", "adamw", "adamw beside fused", kernels.SUM}  # fmt: skip
    parts = [by_name[name] for name in ("norm", "swiglu", "cross_entropy", "adamw")]
    assert by_name["norm"]["count"] == 3
    for side in ("ours_ms", "composed_ms"):
        total = sum(row[side] * row["count"] for row in parts)
        assert by_name[kernels.SUM][side] == pytest.approx(total)
    assert all(row["torch"] and row["machine"] for row in rows)
    assert capsys.readouterr().out.count("| tiny |") == len(rows)
