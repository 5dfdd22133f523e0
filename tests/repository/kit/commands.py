"""The commands, programs and TOML of README.md and docs/, and how a test runs each command.

A command runs in a folder that has the repository's files, in the order of `COMMANDS`, so that one
may use what those before it made. Long ones run shortened; what no test machine has (a cluster,
docker) is replaced by an equivalent, or only looked at (`CHECKED`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FIXTURES = ROOT / "tests" / "fixtures" / "chats"
SHORT = "train.steps=2 optimizer.warmup_steps=1 eval.interval=1 eval.batches=1"
_SERIAL_PIPELINE = "parallel.pp=1 parallel.vpp=1 parallel.dp=1 pipeline.schedule=1f1b"
_ALONE = f"{_SERIAL_PIPELINE} parallel.tp=1 parallel.sequence_parallel=false"
_TWO_RANKS = "parallel.tp=1 parallel.dp=1 parallel.sequence_parallel=false"
_PICTURE = "--pp 4 --microbatches 8 --comm 0.05 --svg docs/schedules"
_PNG = _PICTURE.replace("--svg docs/schedules", "--png docs/images")

# command -> (what is put in place of what, what is added at its end), in order
COMMANDS: dict[str, tuple[dict[str, str], str]] = {
    "bash launch/quickstart.sh": ({"launch": f"{ROOT}/launch"}, SHORT),
    "bash launch/test.sh": (
        {"launch": f"{ROOT}/launch"},
        "--collect-only -q tests/repository/test_readme.py",
    ),
    "source .venv/bin/activate": ({".venv": "venv"}, ""),
    "megalite data prepare my/texts --out data/mine --vocab-size 4096": (
        {"my/texts": f"{ROOT}/docs", "4096": "600"},
        "",
    ),
    "megalite train quickstart --local --name mine data.path=data/mine "
    "data.tokenizer=data/mine.model model.vocab_size=4096": (
        {"4096": "600"},
        f"{SHORT} {_ALONE}",
    ),
    "megalite report runs/mine": ({}, ""),
    'megalite generate runs/mine --prompt "Once" --tokens 64': ({}, ""),
    "megalite info runs/mine": ({}, ""),
    "megalite plan llama-8b-64gpu --gpus 64 --hardware h100": ({}, ""),
    "sbatch --nodes=8 --gpus-per-node=8 --time=24:00:00 launch/pretrain.sbatch llama-8b-64gpu": (
        {
            "sbatch --nodes=8 --gpus-per-node=8 --time=24:00:00 ": "bash -n ",
            ".sbatch ": ".sbatch && megalite train ",
        },
        "--print-config",
    ),
    "torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$HEAD_NODE:29500 "
    "--no-python megalite train llama-8b-64gpu": (
        {
            "--nnodes=8 --nproc-per-node=8": "--nnodes=1 --nproc-per-node=2",
            "$HEAD_NODE:29500": "localhost:0",
            "llama-8b-64gpu": f"quickstart --name launched {_SERIAL_PIPELINE}",
        },
        SHORT,
    ),
    # docs/configuration.md
    "megalite configs": ({}, ""),
    "megalite train quickstart --print-config": ({}, ""),
    # docs/guide.md
    "megalite train quickstart --local": ({}, SHORT),
    "megalite report runs/quickstart": ({}, ""),
    'megalite generate runs/quickstart --prompt "def read_" --tokens 64': ({}, ""),
    "megalite data inspect data/mine": ({}, ""),
    "megalite configs quickstart > mine.toml": ({}, ""),
    "megalite train quickstart --local --name flat parallel.tp=1 parallel.dp=4 "
    "parallel.sequence_parallel=false": ({}, SHORT),
    "megalite data prepare my/books --out data/books --tokenizer data/mine.model": (
        {"my/books": f"{ROOT}/docs"},
        "",
    ),
    "megalite data prepare my/chats.jsonl --out data/chats --tokenizer data/mine.model --messages "
    "messages --chat-template my/chat.jinja": ({"my/": f"{FIXTURES}/"}, ""),
    "megalite train quickstart --local --name chats data.path=data/chats "
    "data.tokenizer=data/mine.model model.vocab_size=4096 data.packing=documents "
    "data.document_masks=true checkpoint.load_weights=runs/mine": (
        {"4096": "600"},
        f"{SHORT} {_ALONE}",
    ),
    "megalite eval runs/quickstart": ({}, "--batches 1"),
    "megalite eval runs/quickstart --tp 2 --pp 2 --batches 1": ({}, ""),
    "megalite eval runs/mine --data data/mine --data books=data/books --json": (
        {},
        "--batches 2",
    ),
    'megalite generate runs/quickstart --prompt "import " --tokens 32 --temperature 0.8 --top-k 50 '
    "--seed 7": ({}, ""),
    "printf 'def \\nclass \\n' > prompts.txt": ({}, ""),
    "megalite generate runs/quickstart --prompts prompts.txt --greedy --tokens 32 --stop "
    '"return" --tp 2': ({}, ""),
    "megalite info runs/quickstart": ({}, ""),
    "megalite doctor": ({}, ""),
    "megalite schedule zb-v --pp 4 --microbatches 8": ({}, ""),
    # docs/exchange.md
    "megalite hf export runs/quickstart models/quickstart": ({}, ""),
    "megalite train quickstart --local --name tuned checkpoint.load_weights=hf:models/quickstart": (
        {},
        f"{SHORT} {_ALONE}",
    ),
    "megalite hf import models/quickstart data/imported --check": ({}, ""),
    "megalite info data/imported": ({}, ""),
    "megalite hf export runs/tuned models/tuned --dtype bfloat16 --check": ({}, ""),
    # docs/layouts.md
    "megalite train quickstart --local --name moved train.steps=2 optimizer.warmup_steps=1": (
        {},
        "",
    ),
    "megalite train quickstart --local --name moved train.steps=4 optimizer.warmup_steps=1 "
    "optimizer.decay_steps=2 parallel.tp=1 parallel.dp=4 parallel.sequence_parallel=false": (
        {},
        "",
    ),
    # docs/reliability.md
    "megalite train quickstart --local --name short train.steps=2 optimizer.warmup_steps=1": (
        {},
        _ALONE,
    ),
    "megalite train quickstart --local --name short train.steps=4 optimizer.warmup_steps=1 "
    "--accept train.steps": ({}, _ALONE),
    # docs/data.md
    "megalite data prepare builtin --out data/stdlib --vocab-size 512 --max-bytes 8000000": (
        {"8000000": "400000"},
        "",
    ),
    "megalite data inspect data/stdlib": ({}, ""),
    "megalite data prepare my/chats.jsonl --out data/chats --tokenizer my/model --messages "
    "messages": (
        {"my/chats": f"{FIXTURES}/chats", "my/model": "data/mine.model"},
        f"--chat-template {FIXTURES}/chat.jinja --overwrite",
    ),
    "megalite data inspect data/chats --rendered": ({}, ""),
    # docs/gpu.md
    "python -m benchmarks.expected_layer": ({}, ""),
    # docs/cluster.md
    "sbatch --nodes=8 --gpus-per-node=8 --cpus-per-task=96 --time=24:00:00 launch/pretrain.sbatch "
    "configs/runs/llama-8b-64gpu.toml": (
        {
            "sbatch --nodes=8 --gpus-per-node=8 --cpus-per-task=96 --time=24:00:00 ": "bash -n ",
            ".sbatch ": ".sbatch && megalite train ",
        },
        "--print-config",
    ),
    "torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$HEAD_NODE:29500 "
    "benchmarks/mfu.py configs/runs/llama-8b-64gpu.toml --work mfu --output rows.jsonl": (
        {
            "--nnodes=8 --nproc-per-node=8": "--nnodes=1 --nproc-per-node=2",
            "$HEAD_NODE:29500": "localhost:0",
            "runs/llama-8b-64gpu.toml": "quickstart.toml --warmup 1 --steps 1"
            + "".join(f" {setting}" for setting in _SERIAL_PIPELINE.split()),
        },
        "",
    ),
    "python benchmarks/mfu.py configs/quickstart.toml --local parallel.dp=1 --warmup 1 --steps 3": (
        {"--steps 3": "--steps 1"},
        "parallel.tp=1 parallel.sequence_parallel=false",
    ),
    # docs/gpu.md, the first day
    "bash benchmarks/first_day.sh": ({}, "--dry --parts doctor --out day"),
    "bash benchmarks/first_day.sh --dry": ({}, "--parts doctor --out dry-day"),
    # docs/kernels.md
    "TRITON_INTERPRET=1 megalite train quickstart --local kernels.backend=interpret": (
        {"--local": ""},
        "--print-config",
    ),
    "python -m benchmarks.gpu_gate": ({}, "--dry --parts launches --output gate.jsonl"),
    "python -m benchmarks.kernels": (
        {},
        "--rounds 1 --sizes tiny --dtypes float32 --output kernels.jsonl",
    ),
    # docs/reading.md
    "megalite schedule gpipe --pp 4 --microbatches 8": ({}, ""),
    "megalite schedule gpipe 1f1b --compare --pp 4 --microbatches 8": ({}, ""),
    "megalite data prepare builtin --out data/quickstart/builtin --vocab-size 512 --max-bytes "
    "400000": ({}, "--overwrite"),
    "megalite train quickstart --local --name exercise train.steps=4 optimizer.warmup_steps=1": (
        {},
        "",
    ),
    "megalite train quickstart --local --name exercise train.steps=8 "
    "optimizer.warmup_steps=1 optimizer.decay_steps=4 parallel.tp=1 parallel.dp=4 "
    "parallel.sequence_parallel=false": ({}, ""),
    # docs/schedules.md
    "megalite schedule": ({}, ""),
    "megalite schedule --compare gpipe 1f1b zb-h1 interleaved interleaved-zb zb-v --microbatches "
    "16 --comm 0.05": ({}, ""),
    "megalite schedule --config configs/quickstart.toml interleaved zb-v --compare": ({}, ""),
    "megalite train quickstart --local --name traced pipeline.trace_step=2": (
        {},
        f"{SHORT} {_TWO_RANKS}",
    ),
    "megalite schedule --from-run runs/traced": ({}, ""),
    f"megalite schedule gpipe --chunks 1 {_PICTURE}/gpipe.svg": ({}, ""),
    f"megalite schedule 1f1b {_PICTURE}/1f1b.svg": ({}, ""),
    f"megalite schedule zb-h1 {_PICTURE}/zb-h1.svg": ({}, ""),
    f"megalite schedule interleaved {_PICTURE}/interleaved.svg": ({}, ""),
    f"megalite schedule interleaved-zb {_PICTURE}/interleaved-zb.svg": ({}, ""),
    f"megalite schedule zb-v {_PICTURE}/zb-v.svg": ({}, ""),
    f"megalite schedule zb-v {_PNG}/schedule.png": ({}, ""),
    # docs/metrics.md
    "megalite report runs/quickstart --out docs/images/loss.png": ({}, ""),
}

# Commands that need docker, buildah or debootstrap: they are read, and what they name is there.
CHECKED = (
    "docker build -t megalite .",
    "debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates "
    "bookworm base",
    "c=$(buildah --storage-driver vfs from scratch)",
    "buildah --storage-driver vfs add $c base / && buildah --storage-driver vfs commit $c "
    "localhost/base:bookworm",
    "buildah --storage-driver vfs build --isolation chroot --network host --build-arg "
    "BASE_IMAGE=localhost/base:bookworm -t localhost/megalite .",
)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language; "" for those that name none."""
    return [text for found, text in fences(page) if found == language]


def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[str]:
    """The commands of a page, each on one line, without comments."""
    for block in blocks(page, "bash"):
        for line in re.sub(r"\\\n\s*", "", block).split("\n"):
            command = line.split("  #")[0].strip()
            if command and not command.startswith("#"):
                yield command
