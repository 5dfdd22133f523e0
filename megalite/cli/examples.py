"""The examples in the help of each verb, by the words of the verb; of the whole command by ""."""

from __future__ import annotations

EXAMPLES = {
    "": (
        "megalite doctor",
        "megalite train quickstart --local",
        "megalite report runs/quickstart",
        'megalite generate runs/quickstart --prompt "def read_"',
    ),
    "train": (
        "megalite train quickstart --local",
        "megalite train quickstart --local --name wide parallel.dp=1 train.steps=60",
        "megalite train quickstart --print-config optimizer.lr=1e-3",
        "torchrun --nproc-per-node=8 --no-python megalite train quickstart",
    ),
    "data": (
        "megalite data prepare builtin --out data/stdlib --vocab-size 512 --max-bytes 8000000",
        "megalite data inspect data/stdlib",
    ),
    "data prepare": (
        "megalite data prepare builtin --out data/stdlib --vocab-size 512 --max-bytes 8000000",
        "megalite data prepare texts/ --out data/mine --tokenizer data/stdlib.model --workers 8",
        "megalite data prepare web.jsonl.gz --out data/web --key content --vocab-size 4096",
        "megalite data prepare chats.jsonl --out data/chats --tokenizer my/model "
        "--messages messages",
    ),
    "data tokenizer": (
        "megalite data tokenizer texts/ --out data/mine.model --vocab-size 4096",
        "megalite data tokenizer builtin --out data/code.model --vocab-size 512 "
        "--max-bytes 1000000",
    ),
    "data inspect": (
        "megalite data inspect data/stdlib",
        "megalite data inspect data/stdlib --documents 1 --tokens 200 --rendered",
    ),
    "data merge": (
        "megalite data merge data/first data/second --out data/both",
        "megalite data merge data/first data/second --out data/both --overwrite",
    ),
    "hf": (
        "megalite hf import models/llama data/llama",
        "megalite hf export runs/quickstart models/quickstart",
    ),
    "hf import": (
        "megalite hf import models/llama data/llama",
        "megalite hf import models/llama data/llama --check",
        "megalite hf import models/llama data/llama --ignore extra_key",
    ),
    "hf export": (
        "megalite hf export runs/quickstart models/quickstart",
        "megalite hf export runs/quickstart models/half --dtype bfloat16 --check",
        "megalite hf export runs/quickstart models/core --names megatron-core",
        "torchrun --nproc-per-node=8 --no-python megalite hf export runs/big models/big",
    ),
    "eval": (
        "megalite eval runs/quickstart",
        "megalite eval runs/quickstart --data data/books --data code=data/stdlib --tp 2 --pp 2",
        "torchrun --nproc-per-node=8 --no-python megalite eval runs/quickstart --tp 2",
    ),
    "configs": ("megalite configs", "megalite configs quickstart"),
    "plan": (
        "megalite plan quickstart",
        "megalite plan llama-8b-64gpu --gpus 64 --hardware h100",
        "megalite plan llama-8b-64gpu --gpus 64 train.micro_batch=2 --json",
    ),
    "report": (
        "megalite report runs/quickstart",
        "megalite report runs/quickstart runs/wide --out losses.png",
    ),
    "generate": (
        'megalite generate runs/quickstart --prompt "def read_" --tokens 64',
        "megalite generate runs/quickstart/checkpoints/latest --greedy",
        "megalite generate runs/quickstart --prompts prompts.txt --temperature 0.5 --seed 7",
    ),
    "info": (
        "megalite info runs/quickstart",
        "megalite info runs/quickstart/checkpoints/latest --quick",
        "megalite info data/stdlib --json",
    ),
    "schedule": (
        "megalite schedule",
        "megalite schedule zb-v --pp 4 --microbatches 8",
        "megalite schedule --compare 1f1b zb-h1 zb-v",
        "megalite schedule --config quickstart pipeline.schedule=zb-v",
    ),
    "doctor": ("megalite doctor", "megalite doctor --json"),
    "version": ("megalite version",),
}
