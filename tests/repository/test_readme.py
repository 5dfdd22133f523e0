"""Every command in the README runs. Long ones run shortened, by further settings at their end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.long

SHORT = "train.steps=2 optimizer.warmup_steps=1 eval.interval=1 eval.batches=1"
TINY_LAYOUT = (
    "configs/quickstart.toml --name launched parallel.pp=1 parallel.vpp=1 parallel.dp=1 "
    f"pipeline.schedule=1f1b {SHORT}"
)

# command of the README -> (what is put in place of what, what is added at its end), in order
COMMANDS: dict[str, tuple[dict[str, str], str]] = {
    "bash launch/quickstart.sh": ({"launch": f"{ROOT}/launch"}, SHORT),
    "bash launch/test.sh": (
        {"launch": f"{ROOT}/launch"},
        "--collect-only -q tests/repository/test_readme.py",
    ),
    "megalite train configs/quickstart.toml --print-config": ({}, ""),
    "megalite data prepare builtin --out data/stdlib --vocab-size 512 --max-bytes 8000000": (
        {"8000000": "400000"},
        "",
    ),
    "megalite data inspect data/stdlib": ({}, ""),
    "megalite train configs/quickstart.toml --local": ({}, SHORT),
    "megalite train configs/quickstart.toml --local --name wide parallel.tp=4 parallel.dp=1 "
    "model.num_kv_heads=4": ({}, SHORT),
    "megalite report runs/quickstart": ({}, ""),
    'megalite generate runs/quickstart --prompt "def read_" --tokens 64': ({}, ""),
    "megalite info runs/quickstart": ({}, ""),
    "megalite doctor": ({}, ""),
    "megalite schedule zb-v --stages 4 --microbatches 8": ({}, ""),
    "megalite plan configs/runs/llama-8b-64gpu.toml --gpus 64 --hardware h100": ({}, ""),
    "python -m tests.parity": ({}, "--first 2"),
    "torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$HEAD_NODE:29500 "
    "--no-python megalite train configs/runs/llama-8b-64gpu.toml": (
        {
            "--nnodes=8 --nproc-per-node=8": "--nnodes=1 --nproc-per-node=2",
            "$HEAD_NODE:29500": "localhost:0",
            "configs/runs/llama-8b-64gpu.toml": TINY_LAYOUT,
        },
        "",
    ),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repository's files to name, and this environment in place of .venv."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("configs", "launch", "tests"):
        (folder / name).symlink_to(ROOT / name)
    environment = folder / "venv"
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith(".installed"):
            (environment / entry.name).symlink_to(entry)
    for stamp in (".installed[plots]", ".installed[dev]"):
        (environment / stamp).touch()
    return folder


def commands_in_readme() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [
        line.split("   #")[0].split("  #")[0].strip() for b in blocks for line in b.split("\n")
    ]
    return [line for line in lines if line]


def test_this_file_knows_every_command_of_the_readme() -> None:
    assert commands_in_readme() == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(work: Path, command: str) -> None:
    replaced, added = COMMANDS[command]
    shown = command
    for old, new in replaced.items():
        assert old in shown
        shown = shown.replace(old, new)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MEGALITE_VENV": str(work / "venv"),
        "MEGALITE_WORK": str(work),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", f"{shown} {added}"],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{shown} {added}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def test_quickstart_leaves_what_it_promises(work: Path) -> None:
    run = work / "runs" / "quickstart"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "metrics.jsonl").is_file()
    assert list((run / "checkpoints").glob("step-*/manifest.json"))
