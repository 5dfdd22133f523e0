"""benchmarks/gpu_gate.py as a command, dry; its table and exit codes on planted rows."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_gate
from benchmarks.gate.collectives import OBJECTS, OPERATIONS
from benchmarks.gate.device import Dead, Gate, Late
from benchmarks.gate.gradients import gradients
from benchmarks.gate.losses import judged
from benchmarks.gate.table import CHECKS, failures, layout, summary
from megalite.distributed import comm
from megalite.kernels import Kernels
from megalite.kernels.triton import tables
from megalite.kernels.triton.table_check import NEEDS
from tests import ROOT


@pytest.mark.long
def test_a_dry_run_goes_through_every_part(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu_gate", "--dry", f"--output={output}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    parts = {row["part"] for row in rows}
    assert parts == {"environment", *gpu_gate.PARTS, *gpu_gate.TUNE}
    assert [row for row in rows if "error" in row or "failed" in row or "skipped" in row] == []
    checked = [row["kernel"] for row in rows if row["part"] == "correctness"]
    timed = {row["kernel"] for row in rows if row["part"] == "rates" and "rival" not in row}
    assert timed <= set(checked)
    # not for a CPU: cuDNN, FlashAttention 3; and Liger, where it is not installed
    absent = {row["rival"] for row in rows if "absent" in row}
    assert absent <= {"sdpa cudnn", "sdpa FA3", "liger"}, [r for r in rows if "absent" in r]
    order = list(dict.fromkeys(row["part"] for row in rows))
    assert order[:4] == ["environment", "gradients", "losses", "nccl"]
    gradients = {(row["kernel"], row["dtype"]) for row in rows if row["part"] == "gradients"}
    assert {name for name, _ in gradients} == {"weight_grad", "embedding_grad"}
    assert {dtype for _, dtype in gradients} == {"bfloat16", "float16", "float32"}
    (losses,) = [row for row in rows if row["part"] == "losses"]
    assert losses["losses"]["interpret"] == pytest.approx(losses["losses"]["reference"], rel=1e-5)
    groups = [row["kernel"] for row in rows if row["part"] == "nccl"]
    assert groups == ["gloo world", "gloo split", "gloo urgent split"]
    assert all(row["correct"] for row in rows if row["part"] in CHECKS)
    (layer,) = [row for row in rows if row.get("kernel") == "layer"]
    assert layer["launches"] > 20
    (trained,) = [row for row in rows if row["part"] == "train"]
    assert set(trained["split_ms"]) == {"forward", "backward", "optimizer"}
    (tuned,) = [row for row in rows if "table" in row]
    assert set(tuned["table"]["kernels"]) == set(NEEDS)
    assert "correctness: " in done.stdout
    assert "budget 2.0 -" in done.stdout
    assert "PASS" in done.stdout


def rate(**changes: Any) -> dict[str, Any]:
    row = {"part": "rates", "kernel": "swiglu", "kind": "elementwise", "ms": 0.2, "fraction": 0.9,
           "tb_per_s": 3.9}  # fmt: skip
    return row | changes


def test_marks_are_reached_or_missed_and_mean_nothing_when_dry() -> None:
    rows = [rate(), rate(kernel="gelu", fraction=0.5), rate(kernel="rope", fraction=None)]
    rows.append({"part": "rates", "kernel": "gelu", "rival": "torch eager", "ours_times_faster": 3})
    lines = {line.split(" | ")[0].strip("| "): line for line in summary(rows, False).splitlines()}
    assert "| 85% | PASS |" in lines["swiglu"]
    assert "| 85% | MISS | torch eager 3.00 |" in lines["gelu"]
    assert "| n/a | 85% | - |" in lines["rope"]
    assert "PASS" not in summary(rows, True)
    assert "MISS" not in summary(rows, True)


def test_a_wrong_kernel_is_told_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"part": "correctness", "kernel": "rope", "shape": {}, "dtype": "float16",
             "correct": False, "faults": ["output 0: 3 x the bound"]}  # fmt: skip
    right = {"part": "correctness", "kernel": "gelu", "correct": True, "error_over_bound": 0.5}
    assert failures([right, wrong]) == [wrong]
    assert "wrong: rope {} float16: output 0: 3 x the bound" in summary([right, wrong], False)
    for rows, code in (([right], 0), ([right, wrong], 1), ([], 1)):
        monkeypatch.setattr(gpu_gate, "run", lambda options, rows=rows: rows)
        assert gpu_gate.main(["--dry", "--parts=correctness"]) == code
    assert gpu_gate.main(["--dry", "--parts=rates"]) == 0


@pytest.mark.parametrize("part", CHECKS)
def test_a_part_that_checked_nothing_fails(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = [{"part": part, "correct": True}]
    for rows, code in ((right, 0), ([{**right[0], "correct": False}], 1), ([], 1)):
        monkeypatch.setattr(gpu_gate, "run", lambda options, rows=rows: rows)
        assert gpu_gate.main(["--dry", f"--parts={part}"]) == code


def test_losses_that_differ_or_do_not_fall_are_wrong() -> None:
    plain = [11.0, 10.5, 10.0]
    assert judged({"reference": plain, "triton": [11.01, 10.49, 10.02]}, "bfloat16")["correct"]
    far = judged({"reference": plain, "triton": [11.0, 10.5, 10.03]}, "bfloat16")
    assert far["faults"] == ["step 3: 10.0 on plain torch and 10.03 differ by more than 0.02"]
    lost = judged({"reference": plain, "triton": [11.0, float("nan"), 10.0]}, "bfloat16")
    assert not lost["correct"]
    flat = judged({"reference": [11.0, 10.9], "triton": [11.0, 10.9]}, "bfloat16")
    assert "fell by 0.1" in str(flat["faults"])


def test_a_weight_gradient_rounded_to_16_bits_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(buffer: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
        buffer += (dy.t().float() @ x.float()).to(dy.dtype)

    found: list[dict[str, Any]] = []
    ops = replace(Kernels(), accumulate_weight_grad_=rounded)
    monkeypatch.setattr("benchmarks.gate.gradients.select", lambda *_: ops)
    gradients(Gate(torch.device("cpu"), True, float("inf"), found.append))
    wrong = {(row["kernel"], row["dtype"]) for row in found if not row["correct"]}
    assert wrong == {("weight_grad", "bfloat16"), ("weight_grad", "float16")}


def test_every_collective_of_an_axis_is_run_on_nccl() -> None:
    """Messages between stages need two ranks."""
    public = {
        name
        for name, function in vars(comm).items()
        if inspect.isfunction(function)
        and function.__module__ == comm.__name__
        and not name.startswith("_")
        and "axis" in inspect.signature(function).parameters
    }
    ran = {name.split()[0] for name in (*OPERATIONS, *OBJECTS)}
    assert public == ran | {"barrier", "local_slice"}


def test_a_process_that_dies_or_hangs_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    order = {"parts": ["correctness"], "dry": False, "until": 0.0}
    calls: list[Any] = []

    def died(command: list[str], **options: Any) -> Any:
        calls.append(command)
        options["stdout"].write('{"part": "correctness", "correct": true}\nnoise\n')
        return subprocess.CompletedProcess(command, -11)

    def hangs(command: list[str], **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", died)
    first, last = gpu_gate.child(order)
    assert first["correct"]
    assert last == {"part": "correctness", "correct": False,
                    "error": "the process ended with exit code -11"}  # fmt: skip
    monkeypatch.setattr(subprocess, "run", hangs)
    (row,) = gpu_gate.child({**order, "parts": ["train"]})
    assert "after its deadline" in row["error"]


class FakeEvent:
    """An event of a device whose time passes only in calls."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


def test_a_time_is_that_of_the_device_over_rotating_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "_sleep", pauses.append, raising=False)
    gate = Gate(torch.device("cuda"), False, 0.0, print)

    def call(inputs: dict[str, int]) -> None:
        seen.append(inputs["set"])
        FakeEvent.now_ms += 0.25

    assert gate.time_s(call, [{"set": n} for n in range(3)]) == pytest.approx(0.25e-3)
    assert seen[:9] == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert len(pauses) == 7
    with pytest.raises(Late, match="0 s left"):
        gate.require(1.0, "more")


def test_a_part_that_fails_leaves_a_row_and_a_dead_device_ends_it() -> None:
    rows: list[dict[str, Any]] = []
    gate = Gate(torch.device("cpu"), True, 0.0, rows.append)
    with gate.guarded({"kernel": "rope"}):
        raise RuntimeError("no such\n  thing")
    assert rows == [{"kernel": "rope", "error": "RuntimeError: no such thing"}]

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    gate.synchronize = broken
    with pytest.raises(Dead, match="illegal"), gate.guarded({"kernel": "rope"}):
        broken()
    assert len(rows) == 2


def test_a_printed_table_is_in_the_form_of_the_committed_one() -> None:
    text = tables.TABLE.read_text(encoding="utf-8")
    assert layout(json.loads(text)) == text


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_gate.parse(["--parts", "rates,speed"])
    assert "no part speed" in capsys.readouterr().err
