"""Logits of a checkpoint beside those of the stock class that transformers makes of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.find import Checkpoint
from megalite.errors import CheckpointError, ConfigError
from megalite.generate.generate import load_model
from megalite.wording import number_of

_TOKENS = 64
_LARGEST_SHARE = 1e-4  # of the largest logit: rounding of float32 over many layers stays below


def check_logits(checkpoint: Checkpoint, folder: Path, weights: str, dtype: str | None) -> str:
    """Compare both in float32 on drawn tokens; returns a line with the largest difference.

    Both models are in memory at once. dtype: the weights were rounded to it in the folder. Raises
    ConfigError if transformers is not installed, CheckpointError if the logits differ.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ConfigError(
            "--check compares with transformers, which is not installed; install it, or leave "
            "--check out"
        ) from None
    model, config = load_model(checkpoint, weights=weights)
    vocab, length = config.model.vocab_size, min(_TOKENS, config.data.seq_length)
    ids = torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(0))
    stock: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    stock.eval()
    with torch.no_grad():
        if dtype is not None:
            for param, _ in model.named_params():
                param.copy_(param.to(getattr(torch, dtype)))
        theirs = stock(ids[None]).logits[0]
        ours = model.logits(ids)[:, : theirs.shape[1]]
    difference, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    count = number_of(length, "token")
    text = f"logits of {count} are equal to {difference:.1e}, the largest is {largest:.3g}"
    if not difference <= _LARGEST_SHARE * largest:
        raise CheckpointError(
            f"{checkpoint.path} and {folder}: {text}; they do not compute the same"
        )
    return f"checked with transformers: {text}"
