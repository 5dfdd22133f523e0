"""Generated tokens per second beside transformers' generate, on CPU, in one run.

    python -m benchmarks.generation [--rounds 5]

Both have the same random weights (ours by way of a Hugging Face folder), the same prompts, greedy
tokens in float32, one thread. Prompts of a batch have one length. Rounds alternate; seconds are
processor time, since other programs run beside; the ratio is that of the medians. The tokens must
be equal. Appends a JSON line.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.circumstances import append_row, circumstances
from megalite.exchange.folder import open_weights
from megalite.generate.generate import Text, generate, load_model
from megalite.generate.sampling import Sampling
from megalite.model.transformer import Transformer

_RESULTS = Path(__file__).resolve().parent / "results" / "generation.jsonl"
_SIZES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8},
    "medium": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
}
_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192}


def both(size: str) -> tuple[Any, Transformer]:
    """The model of transformers and ours, of the same weights."""
    torch.manual_seed(0)
    theirs: Any = LlamaForCausalLM(LlamaConfig(**_SIZES[size], **_HEADS, initializer_range=0.2))
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours, _ = load_model(open_weights(f"hf:{folder}"))
    return theirs.eval(), ours


def measure(size: str, batch: int, prompt: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of both, by round, and their ratio: above 1 ours is quicker."""
    theirs, ours = both(size)
    ids = torch.randint(0, _HEADS["vocab_size"], (batch, prompt))

    def mine() -> list[list[int]]:
        texts = [Text(row, tokens, Sampling(temperature=0)) for row in ids.tolist()]
        for _ in generate(ours, texts):
            pass
        return [text.tokens for text in texts]

    def stock() -> list[list[int]]:
        made = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        found: list[list[int]] = made.tolist()
        return found

    equal = mine() == stock()  # also warms both
    seconds: dict[str, list[float]] = {"ours": [], "transformers": []}
    for _ in range(rounds):
        for name, work in (("ours", mine), ("transformers", stock)):
            began = time.process_time()
            work()
            seconds[name].append(time.process_time() - began)
    mine_s, their_s = median(seconds["ours"]), median(seconds["transformers"])
    return {
        "size": size,
        "batch": batch,
        "prompt": prompt,
        "tokens": tokens,
        "equal_tokens": equal,
        "tokens_per_s": batch * tokens / mine_s,
        "transformers_tokens_per_s": batch * tokens / their_s,
        "ratio": their_s / mine_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", choices=list(_SIZES), default=list(_SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--date", help="written into the row")
    parser.add_argument("--output", type=Path, default=_RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    row = circumstances("generation", options.date)
    row |= {"transformers": transformers.__version__, "threads": torch.get_num_threads()}
    row["cases"] = []
    for size in options.sizes:
        for batch in options.batches:
            found = measure(size, batch, options.prompt, options.tokens, options.rounds)
            row["cases"].append(found)
            print(
                f"{size}, {batch} at a time: {found['tokens_per_s']:.1f} tokens/s, transformers "
                f"{found['transformers_tokens_per_s']:.1f}, ratio {found['ratio']:.2f}, "
                f"tokens {'equal' if found['equal_tokens'] else 'DIFFERENT'}",
                flush=True,
            )
    append_row(options.output, row)


if __name__ == "__main__":
    main()
