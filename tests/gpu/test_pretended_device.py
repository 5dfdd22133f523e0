"""Whole runs on a device that is not the CPU, and computes: cuda:0 in the host's memory.

Nothing may take for granted that a tensor lies in the host's memory, or mix the two. Plain torch
computes, and one process; kernels and operations between ranks have their own tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.record.records import read_metrics
from tests import ROOT

BOUND_S = 300
CONFIG = """
base = "models/llama-tiny"
[model]
num_layers = 2
hidden_size = 64
ffn_hidden_size = 96
vocab_size = 384
[optimizer]
lr_schedule = "constant"
lr = 1e-2
[train]
steps = 4
global_batch = 4
micro_batch = 2
dtype = "float64"
[kernels]
backend = "reference"
[eval]
interval = 2
batches = 2
[checkpoint]
interval = 2
[data]
seq_length = 64
split = [0.9, 0.1]
"""
LONGER = ["train.steps=6", "--accept", "train.steps"]
BFLOAT16 = ["train.dtype=bfloat16", "optimizer.ema_decay=0.9", "eval.weights=ema"]
FLOAT16 = [
    *("model.family=gpt2", "model.num_kv_heads=4", "model.residual_dropout=0.1"),
    *("train.dtype=float16", "train.z_loss=1e-4", "train.recompute=full", "optimizer.name=muon"),
    *("train.loss_spike=skip", "log.param_stats_interval=2", "data.document_masks=true"),
]


@pytest.fixture(scope="module")
def runs(library: Path, values: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on both devices: first one of float64 each, longer at once on the CPU."""
    folder = tmp_path_factory.mktemp("device")
    config = folder / "run.toml"
    config.write_text(CONFIG)
    for number in range(3):
        source = ROOT / "megalite" / "schedules" / ("action.py", "check.py", "lower.py")[number]
        (folder / f"{number}.txt").write_text(source.read_text(encoding="utf-8"))
    prepared = ["data", "prepare", str(folder), "--out", str(folder / "data"), "--vocab-size=384"]

    def train(name: str, *words: str) -> list[str]:
        data = [f"data.path={folder / 'data'}", f"data.tokenizer={folder / 'data.model'}"]
        return ["train", str(config), f"out={folder}", f"name={name}", *data, *words]

    run("-m", "megalite", *prepared)
    run("-m", "megalite", *train("host", "train.steps=6", "--device=cpu"))
    generate = ["generate", str(folder / "device"), "--device=cuda", "--tokens=8", "--prompt=def"]
    commands = [
        train("device"),
        train("device", *LONGER),
        generate,
        train("bfloat16", *BFLOAT16),
        train("float16", *FLOAT16),
    ]
    words = ["-m", "tests.gpu.kit.values", str(library), str(values), json.dumps(commands)]
    (folder / "out.txt").write_text(run(*words))
    return folder


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def lines(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    metrics = read_metrics(folder / name / "metrics.jsonl")
    return [line for line in metrics if line["kind"] == kind]


def test_losses_are_those_of_the_cpu_also_after_a_resume(runs: Path) -> None:
    for kind, key in (("step", "loss"), ("step", "grad_norm"), ("eval", "loss")):
        here = [line[key] for line in lines(runs, "host", kind)]
        there = [line[key] for line in lines(runs, "device", kind)]
        assert there == pytest.approx(here, rel=1e-12)
        assert len(here) == (6 if kind == "step" else 3)


def test_the_run_is_on_the_device_and_is_resumed(runs: Path) -> None:
    [first] = lines(runs, "device", "run")
    assert "H100" in json.dumps(first["hardware"])
    assert len(lines(runs, "device", "restart")) == 1
    assert "resumed from" in (runs / "out.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_16_bits_are_trained_and_saved(name: str, runs: Path) -> None:
    losses = [line["loss"] for line in lines(runs, name, "step")]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.3
    assert len(lines(runs, name, "checkpoint")) == 2
    assert [line["step"] for line in lines(runs, name, "eval")] == [2, 4]


def test_text_is_generated(runs: Path) -> None:
    out = (runs / "out.txt").read_text(encoding="utf-8")
    [text] = [line for line in out.splitlines() if line.startswith("def")]
    assert len(text) > len("def")


def test_tensors_of_the_host_are_refused_beside_those_of_the_device(
    library: Path, values: Path
) -> None:
    """Otherwise the runs above would prove little."""
    code = f"""
from pathlib import Path
from tests.gpu.kit import shim
shim.load(Path({str(library)!r}))
import torch
torch.ops.load_library({str(values)!r})
from tests.gpu.kit.device import pretend_with_values
pretend_with_values()
there, here = torch.ones(3, device="cuda:0"), torch.ones(3)
for use in (lambda: there + here, lambda: there.addmm(there.view(1, 3), here.view(3, 1)),
            lambda: torch.cat([there, here]), lambda: there.numpy()):
    try:
        use()
    except (RuntimeError, TypeError) as error:
        print(error)
    else:
        raise SystemExit("taken")
assert (there + here[0]).tolist() == [2.0, 2.0, 2.0]
"""
    assert len(run("-c", code).splitlines()) >= 4
