"""How fast one core reads training data from the page cache: tokens per second of CPU time.

Writes datasets of random ids to a temporary folder, reads each once so that it is cached, and then
times steps at random places of long runs, shuffled, with every check that training makes. One JSON
line a case: the best of several rounds, since other load only ever adds.

    python benchmarks/loader.py
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from megalite.corpus.indexed_writer import IndexedWriter
from megalite.data.batches import Batches
from megalite.data.dataset import TokenDataset
from megalite.record.metrics import git_commit, versions

VOCAB = 50_000
DOCUMENT_TOKENS = 1000
SAMPLES_PER_STEP = 64


def make_dataset(prefix: Path, tokens: int, seed: int) -> TokenDataset:
    ids = np.random.default_rng(seed).integers(0, VOCAB, DOCUMENT_TOKENS)
    with IndexedWriter(prefix, VOCAB) as writer:
        for _ in range(tokens // DOCUMENT_TOKENS):
            writer.add_document(ids)
        writer.publish()
    return TokenDataset(prefix)


def cases(datasets: list[TokenDataset]) -> Iterator[tuple[str, Batches, int]]:
    """(name, batches, samples a microbatch)"""
    spans = [data.span() for data in datasets]
    one = spans[0]
    for length in (128, 1024, 4096):
        yield f"one source, {length} tokens", Batches(one, length, 1, vocab_size=VOCAB), 4
    yield (
        "one source, 2048 tokens, document masks",
        Batches(one, 2048, 1, document_masks=True, vocab_size=VOCAB),
        4,
    )
    weights = [Fraction(weight) for weight in ("0.5", "0.3", "0.15", "0.04", "0.01")]
    batches = Batches(spans, 2048, 1, weights=weights, vocab_size=VOCAB)
    yield "five sources, 2048 tokens", batches, 4
    uneven = [Fraction(np.pi**-n) for n in range(5)]
    tight = [Fraction(n, 10**6) for n in (12278, 112399, 392837, 683864, 138691)]
    for name, weights in (("uneven", uneven), ("tight", tight)):  # by a tree, by halving
        batches = Batches(spans, 2048, 1, weights=weights, vocab_size=VOCAB)
        yield f"five sources of {name} weights, 2048 tokens", batches, 4


def tokens_per_cpu_s(batches: Batches, micro_batch: int, steps: int) -> float:
    first = 1_000_003 * SAMPLES_PER_STEP
    began = time.process_time()
    tokens = 0
    for step in range(steps):
        place = first + step * SAMPLES_PER_STEP
        for batch in batches.rank_batches(place, SAMPLES_PER_STEP, micro_batch, 0, 1):
            tokens += len(batch.tokens)
    return tokens / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000_000, help="of each of five sources")
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        datasets = [make_dataset(Path(folder) / f"source{n}", options.tokens, n) for n in range(5)]
        for name, batches, micro_batch in cases(datasets):
            rates = [
                tokens_per_cpu_s(batches, micro_batch, options.steps)
                for _ in range(options.rounds + 1)
            ]
            row = {
                "benchmark": "loader",
                "case": name,
                "tokens_per_cpu_s": round(max(rates[1:])),  # the first round fills the cache
                "rounds": options.rounds,
                "load_average": os.getloadavg()[0],
                "commit": git_commit(),
                "versions": versions(),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
