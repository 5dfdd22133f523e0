"""Text from a run's newest checkpoint, in one process, whatever layout trained it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.find import Checkpoint, find_latest
from megalite.checkpoint.load import load
from megalite.checkpoint.pieces import NamedPiece
from megalite.config import PipelineConfig, RunConfig
from megalite.data.tokenizer import Tokenizer
from megalite.distributed.mesh import Mesh
from megalite.distributed.precision import DTYPES
from megalite.errors import CheckpointError, ConfigError, DataError
from megalite.model.transformer import Transformer
from megalite.topology import Topology
from megalite.train.engine import build_chunks


def open_run(run: Path) -> Checkpoint:
    """Newest sound checkpoint of a run folder; CheckpointError if there is none."""
    found = find_latest(run / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"{run} {'holds no checkpoint' if run.is_dir() else 'does not exist'}; give the folder "
            "of a run that has saved (at its end, on a signal, and every checkpoint.interval steps)"
        )
    return found


def load_model(checkpoint: Checkpoint) -> tuple[Transformer, RunConfig]:
    """The whole model on the CPU, in the dtype its weights were saved in."""
    config = RunConfig.model_validate(checkpoint.manifest.config, strict=False)
    layout = config.parallel.model_copy(
        update={
            "tp": 1,
            "pp": 1,
            "vpp": 1,
            "dp": 1,
            "sequence_parallel": False,
            "stage_layers": None,
        }
    )
    # Masters of a 16-bit run are saved in float32.
    dtype = "float64" if config.train.dtype == "float64" else "float32"
    train = config.train.model_copy(update={"dtype": dtype})
    config = config.model_copy(
        update={
            "parallel": layout,
            "pipeline": PipelineConfig(schedule="1f1b"),
            "train": train,
        }
    )
    (chunk,) = build_chunks(config, Mesh(Topology()), DTYPES[dtype])
    pieces = [
        NamedPiece.of_shard("param", spec, 1, 0, param.detach())
        for param, spec in chunk.named_params()
    ]
    load(checkpoint, pieces, allow_unused=True)
    return chunk, config


def load_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer that the run's config names."""
    if config.data.tokenizer is None:
        raise ConfigError("the run names no data.tokenizer; it cannot write text")
    return Tokenizer(config.data.tokenizer)


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: list[int],
    num_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    eos_id: int | None = None,
    num_ids: int | None = None,
) -> list[int]:
    """Up to `num_tokens` ids that continue `prompt`; temperature 0 takes the likeliest each time.

    The context is the last `seq_length` tokens. Stops after `eos_id`; chooses only ids below
    `num_ids`, where the tokenizer has fewer than the model. The same seed gives the same text.
    Raises DataError for an empty prompt or an id outside the vocabulary.
    """
    vocab = model.config.vocab_size
    if not prompt or not all(0 <= token < vocab for token in prompt):
        raise DataError(
            f"the prompt gives the token ids {prompt}; it must give one or more below {vocab}: "
            "use a text that is not empty, and the run's own tokenizer"
        )
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        context = torch.tensor(tokens[-model.seq_length :])
        tokens.append(_pick(model.logits(context)[-1, :num_ids], temperature, top_k, generator))
        if tokens[-1] == eos_id:
            break
    return tokens[len(prompt) :]


def _pick(
    logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = (logits_V - logits_V.max()).float() / temperature
    if top_k is not None and top_k < len(logits_V):
        logits_V[logits_V < logits_V.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits_V.softmax(0), 1, generator=generator))
