"""How fast `data prepare` encodes, beside sentencepiece alone: CPU time, one core, one process.

    python -m benchmarks.data [--rounds N] [--text-bytes N]

The text is the standard library's, as JSON lines. Library: the fastest of its three ways to get ids
as lists from documents that are in memory already. Prepare: from the file to the finished dataset,
all checks, in the process that measures (`--workers 1`: what each of many workers does). Rounds
alternate and give a ratio each, because other load disturbs; the median counts. One more run with
two workers shows what the parent spends a megabyte of text, which says how many it can feed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import sentencepiece

from benchmarks.circumstances import append_row, circumstances
from megalite.corpus.corpus import open_corpus
from megalite.corpus.prepare import prepare
from megalite.corpus.prepare_tokenizer import make_tokenizer

VOCAB_SIZE = 8192
_RESULTS = Path(__file__).resolve().parent / "results" / "data.jsonl"


def main() -> None:
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = write_source(folder / "source.jsonl", options.text_bytes)
        for model_type in ("bpe", "unigram"):
            row = {
                **circumstances("data_prepare", options.date),
                "sentencepiece": sentencepiece.__version__,
                **measure(folder, texts, model_type, options.rounds),
            }
            append_row(options.output, row)
            print(
                f"{model_type}: prepare {row['prepare_mb_per_s']:.2f} MB/s a worker, sentencepiece "
                f"{row['library_mb_per_s']:.2f} MB/s; ratio {row['ratio']:.3f} "
                f"({row['ratio_min']:.3f} to {row['ratio_max']:.3f}); "
                f"parent {row['parent_ms_per_mb']:.1f} ms a MB"
            )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command-line options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--text-bytes", type=int, default=6_000_000)
    parser.add_argument("--date", help="written into the rows")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="JSON lines are added here")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.text_bytes < 1:
        parser.error("--rounds and --text-bytes must be at least 1")
    return options


def write_source(path: Path, text_bytes: int) -> list[str]:
    """Write documents as JSON lines; the documents."""
    texts = list(open_corpus("builtin", max_bytes=text_bytes).documents())
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def measure(folder: Path, texts: list[str], model_type: str, rounds: int) -> dict[str, Any]:
    """Figures of one kind of tokenizer."""
    model = str(folder / f"{model_type}.model")
    make_tokenizer(
        open_corpus(str(folder / "source.jsonl")),
        model,
        vocab_size=VOCAB_SIZE,
        model_type="bpe" if model_type == "bpe" else "unigram",
    )
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    ways = library_ways(sentencepiece.SentencePieceProcessor(model_file=model), texts)
    best = min(ways, key=lambda name: cpu_s(ways[name]))
    library, ours = [], []
    for number in range(rounds):
        library.append(cpu_s(ways[best]))
        ours.append(cpu_s(lambda: run(folder, model, f"{model_type}{number}", 1)))  # noqa: B023
    ratios = [one / other for one, other in zip(library, ours, strict=True)]
    parent_s = cpu_s(lambda: run(folder, model, f"{model_type}-two", 2))
    return {
        "model_type": model_type,
        "vocab_size": VOCAB_SIZE,
        "text_bytes": round(megabytes * 1e6),
        "num_documents": len(texts),
        "rounds": rounds,
        "library_way": best,
        "library_mb_per_s": megabytes / min(library),
        "prepare_mb_per_s": megabytes / min(ours),
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "parent_ms_per_mb": 1e3 * parent_s / megabytes,
    }


def library_ways(
    processor: sentencepiece.SentencePieceProcessor, texts: list[str]
) -> dict[str, Callable[[], Any]]:
    """Ways to encode documents with the library alone."""
    data = [text.encode() for text in texts]
    return {
        "loop over str": lambda: [processor.encode(text) for text in texts],
        "batch of str": lambda: processor.encode(texts, num_threads=1),
        "batch of bytes": lambda: processor.encode(data, num_threads=1),
    }


def run(folder: Path, model: str, name: str, workers: int) -> None:
    """One whole `prepare`."""
    corpus = open_corpus(str(folder / "source.jsonl"))
    prepare(corpus, str(folder / name), tokenizer=model, num_workers=workers)


def cpu_s(work: Callable[[], Any]) -> float:
    """CPU seconds of this process (children are not counted)."""
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


if __name__ == "__main__":
    main()
