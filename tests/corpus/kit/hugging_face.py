"""Hugging Face tokenizer folders for tests, trained here, with the special tokens of ChatML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, START, END = "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"
SPECIAL = [BOS, EOS, START, END]
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and reads a book about numbers.",
    "def read_file(path):\n    return open(path).read()  # a file\n",
    "What is the capital of France? It is Paris. user assistant system\n",
] * 20


def bytes_tokenizer(adds_bos: bool = False, vocab_size: int = 400) -> Tokenizer:
    """A byte-level BPE tokenizer like those of Llama 3 and Qwen; ids 0 to 3 are SPECIAL."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    if adds_bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
        )
    return made


def words_tokenizer(unk: str | None) -> Tokenizer:
    """A tokenizer of whole characters, without bytes: it knows `unk` for others, or drops them."""
    made = Tokenizer(models.BPE(unk_token=unk, fuse_unk=unk is not None))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [EOS, *([unk] if unk else [])]
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    return made


def write_folder(
    folder: Path, made: Tokenizer | None = None, template: str | None = None, **config: Any
) -> Path:
    """Write a tokenizer as transformers does; `config` goes into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    made = bytes_tokenizer() if made is None else made
    made.save(str(folder / "tokenizer.json"))
    values = {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast", **config}
    if made.token_to_id(BOS) is not None:
        values["bos_token"] = BOS
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
