"""Corpora by their path, the options of both in one call; compressed files."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa

from megalite.corpus import prepare as module
from megalite.corpus.corpus import Corpus, open_corpus
from megalite.corpus.documents import CorpusReport
from megalite.corpus.prepare import PrepareReport
from megalite.corpus.prepare_tokenizer import make_tokenizer as make
from megalite.corpus.tokenizer_training import TrainReport

CORPUS_OPTIONS = ("key", "policy", "max_bytes", "suffixes", "encoding")


def prepare(source: str, out: str, **options: Any) -> PrepareReport:
    """`prepare` of the corpus at a path."""
    corpus = _take_corpus(source, options)
    return module.prepare(corpus, out, **options)


def make_tokenizer(source: str, out: str, **options: Any) -> tuple[TrainReport, CorpusReport]:
    """`make_tokenizer` of the corpus at a path."""
    corpus = _take_corpus(source, options)
    return make(corpus, out, **options)


def _take_corpus(source: str, options: dict[str, Any]) -> Corpus:
    taken = {name: options.pop(name) for name in CORPUS_OPTIONS if name in options}
    return open_corpus(source, **taken)


def write_container(path: Path, content: bytes) -> Path:
    """Write a file, compressed as its name says."""
    if path.suffix == ".zst":
        half = len(content) // 2
        codec = pa.Codec("zstd")  # two frames, as parallel compressors write
        content = b"".join(
            codec.compress(p, asbytes=True) for p in (content[:half], content[half:])
        )
    elif path.suffix == ".gz":
        content = gzip.compress(content)
    path.write_bytes(content)
    return path
