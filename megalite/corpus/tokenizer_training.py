"""Training a sentencepiece tokenizer (unigram or bpe) whose decoding gives back the text exactly.

Rare characters and line ends become bytes (byte fallback); there is no normalisation and no dummy
prefix, and white space is kept, so source code survives. The trainer expects sentences and gets
lines: each document is cut at line ends, and lines over MAX_LINE_BYTES are cut into pieces of that
size, as the library would drop them. Large corpora are sampled: the lines with the smallest keyed
hash of their number, up to a budget, so the same corpus gives the same tokenizer. The library runs
with one thread, as its thread count changes the last digits of unigram scores. Memory: the sample,
not the corpus.
"""

from __future__ import annotations

import heapq
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import sentencepiece

from megalite.data.sampler import mix64
from megalite.errors import DataError
from megalite.wording import number_of

ModelType = Literal["unigram", "bpe"]
MAX_LINE_BYTES = 4096
RESERVED = "\u2585"  # the trainer drops any sentence that holds it, so lines are cut there
# Bytes of training text per entry of the vocabulary. Unigram is some ten times slower than bpe.
SAMPLE_BYTES_PER_ENTRY = {"unigram": 512, "bpe": 2048}
MIN_SAMPLE_BYTES = 1 << 20
UNK_ID, BOS_ID, EOS_ID, PAD_ID = 0, 1, 2, 3
MIN_VOCAB_SIZE = 4 + 256 + 1  # control ids, bytes, one character


@dataclass(frozen=True)
class TrainReport:
    """The text that a tokenizer was trained on."""

    model_type: str
    vocab_size: int
    corpus_bytes: int  # text offered, without line ends
    sample_bytes: int  # text trained on
    skipped_bytes: int  # text that the trainer cannot take (U+2585), of what was offered
    num_lines: int
    num_lines_cut: int  # lines longer than MAX_LINE_BYTES, cut into pieces
    cut_bytes: int  # text of those lines

    @property
    def skipped_share(self) -> float:
        return self.skipped_bytes / self.corpus_bytes if self.corpus_bytes else 0.0

    @property
    def cut_share(self) -> float:
        return self.cut_bytes / self.corpus_bytes if self.corpus_bytes else 0.0


def train_tokenizer(
    documents: Iterable[str],
    vocab_size: int,
    model_type: ModelType = "bpe",
    sample_bytes: int | None = None,
) -> tuple[bytes, TrainReport]:
    """Train a sentencepiece model on a sample of the documents' lines; returns its file's content.

    `sample_bytes`: the most text to train on; by default as much as `vocab_size` entries need.
    Raises DataError for a bad setting, for no text, and for a text that does not fill `vocab_size`
    entries, with the size that it fills.
    """
    if model_type not in SAMPLE_BYTES_PER_ENTRY:
        raise DataError(f"model_type={model_type!r}; must be 'unigram' or 'bpe'")
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"vocab_size={vocab_size}; must be at least {MIN_VOCAB_SIZE}: "
            "4 control entries, 256 bytes and one character"
        )
    if sample_bytes is not None and sample_bytes < 1:
        raise DataError(f"sample_bytes={sample_bytes}; must be 1 or more, or left out")

    # Sampled while the documents pass, so memory holds the sample and not the corpus.
    budget = sample_bytes or max(MIN_SAMPLE_BYTES, vocab_size * SAMPLE_BYTES_PER_ENTRY[model_type])
    sample = LineSample(budget)
    for document in documents:
        sample.add(document)
    if not sample.num_lines:
        raise DataError("no text to train a tokenizer on; give documents that hold some")
    model = _train(sample.lines(), vocab_size, model_type)
    return model, TrainReport(
        model_type,
        vocab_size,
        sample.corpus_bytes,
        sample.kept_bytes,
        sample.skipped_bytes,
        sample.num_lines,
        sample.num_lines_cut,
        sample.cut_bytes,
    )


class LineSample:
    """A sample of the lines of a stream: those with the smallest hash of their number.

    They have at most `budget_bytes` together, but there is always one. The counts cover all lines.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.corpus_bytes = self.kept_bytes = self.skipped_bytes = 0
        self.num_lines = self.num_lines_cut = self.cut_bytes = 0
        # A heap of (-hash, number, line): the line with the largest hash is on top.
        self._kept: list[tuple[int, int, bytes]] = []
        self._full = False

    def add(self, document: str) -> None:
        """Add a document, cut into lines and those into pieces that the trainer accepts."""
        for line in document.split("\n"):
            if (size := len(line.encode())) > MAX_LINE_BYTES:
                self.num_lines_cut += 1
                self.cut_bytes += size
            for piece in line.split(RESERVED):
                for part in cut_line(piece.encode()):
                    self._offer(part)
            reserved_bytes = line.count(RESERVED) * len(RESERVED.encode())
            self.skipped_bytes += reserved_bytes
            self.corpus_bytes += reserved_bytes

    def lines(self) -> list[bytes]:
        """The sample in the order of the stream."""
        return [line for _, _, line in sorted(self._kept, key=lambda entry: entry[1])]

    def _offer(self, line: bytes) -> None:
        """Keep a line if its hash is among the smallest; drop the largest beyond the budget."""
        number = self.num_lines
        self.num_lines += 1
        self.corpus_bytes += len(line)
        rank = -mix64(number + 1)
        if self._full and rank < self._kept[0][0]:
            return
        heapq.heappush(self._kept, (rank, number, line))
        self.kept_bytes += len(line)
        while self.kept_bytes > self.budget_bytes and len(self._kept) > 1:
            self._full = True
            self.kept_bytes -= len(heapq.heappop(self._kept)[2])


def cut_line(line: bytes) -> Iterator[bytes]:
    """Pieces of a line of at most MAX_LINE_BYTES, cut between characters; none if it is empty."""
    start = 0
    while start < len(line):
        stop = min(start + MAX_LINE_BYTES, len(line))
        while stop < len(line) and line[stop] & 0xC0 == 0x80:  # inside a character
            stop -= 1
        yield line[start:stop]
        start = stop


def _train(lines: list[bytes], vocab_size: int, model_type: ModelType) -> bytes:
    """Train with the library; returns the content of the model's file."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=PAD_ID,
            byte_fallback=True,
            character_coverage=0.9995,  # rarer characters become bytes
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,  # indentation
            split_digits=True,
            max_sentence_length=MAX_LINE_BYTES + 1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _infeasible(str(error), vocab_size, lines) from error
    return model.getvalue()


def _infeasible(message: str, vocab_size: int, lines: list[bytes]) -> DataError:
    """The error for a size that the library refuses; its message contains the feasible size."""
    text = f"{number_of(sum(map(len, lines)), 'byte')} of training text"
    if found := re.search(r"Vocabulary size too high .*<= (\d+)", message):
        return DataError(
            f"vocab_size={vocab_size} is more than {text} can fill; "
            f"the largest feasible is {found[1]}: use at most that, or more text"
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return DataError(
            f"vocab_size={vocab_size} is less than {text} needs for its characters; "
            f"the smallest feasible is {found[1]}: use at least that"
        )
    return DataError(f"sentencepiece could not train vocab_size={vocab_size} on {text}: {message}")
