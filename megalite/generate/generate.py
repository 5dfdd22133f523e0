"""Text from a run's checkpoint of any layout, in one process.

Reading order: `load_model`, `generate`, then `text_pieces`. Each token is one forward over
the context: nothing is cached from one token to the next, which suits models small enough to be
tried on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch

from megalite.checkpoint.find import Checkpoint
from megalite.checkpoint.load import load
from megalite.checkpoint.pieces import NamedPiece
from megalite.config import PipelineConfig, RunConfig
from megalite.config.saved import saved_config
from megalite.data.tokenizer import Tokenizer, open_tokenizer
from megalite.distributed.mesh import Mesh
from megalite.distributed.precision import DTYPES
from megalite.errors import ConfigError, DataError
from megalite.generate.sampling import Sampling
from megalite.layout.topology import Topology
from megalite.model.transformer import Transformer
from megalite.train.engine import build_chunks
from megalite.train.kernel_choice import generation_kernels


def load_model(
    checkpoint: Checkpoint, device: torch.device | None = None, weights: str = "param"
) -> tuple[Transformer, RunConfig]:
    """The whole model on one device (default: the CPU), in the dtype its weights were saved in.

    `weights`: "param", or "ema" for the average that the run kept; ConfigError if it kept none.
    """
    config = serial_config(checkpoint)
    if weights == "ema" and config.optimizer.ema_decay is None:
        raise ConfigError(
            f"{checkpoint.path} holds no average of the weights (optimizer.ema_decay was not set); "
            "leave out --ema"
        )
    mesh = Mesh(Topology(), device)
    dtype = DTYPES[config.train.dtype]
    ops = generation_kernels(config, mesh.device, dtype)
    (chunk,) = build_chunks(config, mesh, dtype, placement=[0], ops=ops)
    pieces = [
        NamedPiece.of_shard(weights, spec, 1, 0, param.detach())
        for param, spec in chunk.named_params()
    ]
    load(checkpoint, pieces, whole_kinds=(weights,), vocab_size=config.model.vocab_size)
    return chunk, config


def serial_config(checkpoint: Checkpoint) -> RunConfig:
    """The config that a checkpoint was saved with, for one process in full precision."""
    config = saved_config(checkpoint.manifest.config, str(checkpoint.path))
    serial = {"tp": 1, "pp": 1, "vpp": 1, "dp": 1, "sequence_parallel": False}
    layout = config.parallel.model_copy(update={**serial, "stage_layers": None})
    # Masters of a 16-bit run are saved in float32.
    dtype = "float64" if config.train.dtype == "float64" else "float32"
    train = config.train.model_copy(update={"dtype": dtype, "recompute": "none"})
    changes = {"parallel": layout, "pipeline": PipelineConfig(schedule="1f1b"), "train": train}
    return config.model_copy(update=changes)


def load_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer that the run's config names. Raises ConfigError if it names none."""
    if config.data.tokenizer is None:
        raise ConfigError(
            "the run was trained without data.tokenizer, so it can neither read nor write text; "
            "resume it with data.tokenizer=FILE, which its next checkpoint then names"
        )
    return open_tokenizer(config.data.tokenizer)


def generate(
    model: Transformer,
    prompt: list[int],
    num_tokens: int,
    sampling: Sampling | None = None,
    *,
    eos_id: int | None = None,
    num_ids: int | None = None,
) -> Iterator[int]:
    """Up to `num_tokens` ids that continue `prompt`, each made when it is asked for.

    The context is the last `seq_length` tokens. Stops after `eos_id`; chooses only ids below
    `num_ids`, where the tokenizer has fewer than the model. Raises DataError for an empty prompt or
    an id outside the vocabulary.
    """
    vocab = model.config.vocab_size
    if not prompt or not all(0 <= token < vocab for token in prompt):
        raise DataError(
            f"the prompt gives the token ids {prompt}; it must give one or more below {vocab}: "
            "use a text that is not empty, and the run's own tokenizer"
        )

    return _ids(model, list(prompt), num_tokens, sampling or Sampling(), eos_id, num_ids)


@torch.no_grad()
def _ids(
    model: Transformer,
    tokens: list[int],
    num_tokens: int,
    sampling: Sampling,
    eos_id: int | None,
    num_ids: int | None,
) -> Iterator[int]:
    # One generator for the whole text: the same seed gives the same draws.
    generator = sampling.generator()
    for _ in range(num_tokens):
        context = torch.tensor(tokens[-model.seq_length :], device=model.context.device)
        tokens.append(sampling.pick(model.logits(context)[-1, :num_ids], generator))
        yield tokens[-1]
        if tokens[-1] == eos_id:
            break


def text_pieces(tokenizer: Tokenizer, prompt: list[int], ids: Iterable[int]) -> Iterator[str]:
    """The text of `prompt` and then of `ids`, each piece as soon as no later id can change it.

    Joined, the pieces are the text of all ids decoded together: a character may consist of tokens
    of both parts, and the space that begins a text is left out.
    """
    tokens = list(prompt)
    text, num_shown = "", 0
    for more in chain([[]], ([token] for token in ids)):
        tokens += more
        text = tokenizer.decode(tokens)
        # The bytes of an unfinished character are decoded as U+FFFD until the others are there.
        settled = text.rstrip("\ufffd")
        if len(settled) > num_shown:
            yield settled[num_shown:]
            num_shown = len(settled)
    if text[num_shown:]:
        yield text[num_shown:]
