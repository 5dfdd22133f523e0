"""Text from a checkpoint of any layout: texts of different lengths are continued side by side.

Reading order: `load_model`, then `Text` and `generate`. Prompts are read in one forward; after it
each token takes one row of the model, over the keys and values that `model/cache.py` keeps. A text
that has outgrown the model's sequence length is read again for each token: its last `seq_length`
tokens are a context of their own, whose positions begin at 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from megalite.checkpoint.find import Checkpoint
from megalite.checkpoint.load import load
from megalite.checkpoint.pieces import NamedPiece
from megalite.checks import check_and_resolve
from megalite.config import PipelineConfig, RunConfig
from megalite.config.saved import saved_config
from megalite.distributed.agree import Ranks
from megalite.distributed.mesh import Mesh
from megalite.distributed.precision import DTYPES
from megalite.errors import ConfigError, DataError
from megalite.generate.sampling import Sampling
from megalite.layout.topology import Topology
from megalite.model.cache import Cache
from megalite.model.transformer import Transformer
from megalite.train.engine import build_chunks
from megalite.train.kernel_choice import generation_kernels


def load_model(
    checkpoint: Checkpoint, mesh: Mesh | None = None, weights: str = "param"
) -> tuple[Transformer, RunConfig]:
    """The whole model, or this rank's part of each layer, in the dtype its weights were saved in.

    mesh: of tensor-parallel ranks, which all call it; None: this process and its CPU. `weights`:
    "param", or "ema" for the average that the run kept; ConfigError if it kept none.
    """
    mesh = mesh or Mesh(Topology())
    config = text_config(checkpoint, mesh.tp.size)
    if weights == "ema" and config.optimizer.ema_decay is None:
        raise ConfigError(
            f"{checkpoint.path} holds no average of the weights (optimizer.ema_decay was not set); "
            "leave out --ema"
        )
    dtype = DTYPES[config.train.dtype]
    ops = generation_kernels(config, mesh.device, dtype)
    (chunk,) = build_chunks(config, mesh, dtype, placement=[0], ops=ops)
    pieces = [
        NamedPiece.of_shard(weights, spec, axis.size, axis.rank, param.detach())
        for param, spec in chunk.named_params()
        for axis in [mesh.axis(spec.grid.cut_axis)]
    ]
    ranks = Ranks(mesh.world)
    load(checkpoint, pieces, ranks, whole_kinds=(weights,), vocab_size=config.model.vocab_size)
    return chunk, config


def text_config(checkpoint: Checkpoint, tp: int = 1) -> RunConfig:
    """The config that a checkpoint was saved with, for `tp` ranks in full precision.

    Raises ConfigError for a number of ranks that does not divide the model.
    """
    config = saved_config(checkpoint.manifest.config, str(checkpoint.path))
    split = {"tp": tp, "pp": 1, "vpp": 1, "dp": 1, "sequence_parallel": False}
    layout = config.parallel.model_copy(update={**split, "stage_layers": None})
    # Masters of a 16-bit run are saved in float32.
    dtype = "float64" if config.train.dtype == "float64" else "float32"
    train = config.train.model_copy(update={"dtype": dtype, "recompute": "none"})
    changes = {"parallel": layout, "pipeline": PipelineConfig(schedule="1f1b"), "train": train}
    changed = config.model_copy(update=changes)
    return changed if tp == 1 else check_and_resolve(changed, tp)


class Text:
    """A text to continue by up to `num_tokens` ids, up to one of `end_ids`, with its own draws.

    `tokens` are those of the prompt and then the added ones. Whoever reads them may set `ended`.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        sampling: Sampling | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        self.tokens, self.max_tokens = list(prompt), len(prompt) + num_tokens
        self.ended = num_tokens < 1
        # One generator for the whole text: the same seed gives the same draws.
        self._sampling = sampling or Sampling()
        self._draws, self._end_ids = self._sampling.generator(), end_ids

    def choose(self, logits_V: torch.Tensor) -> int:
        """Choose the next token by its logits, and add it."""
        token = self._sampling.pick(logits_V, self._draws)
        self.tokens.append(token)
        self.ended = token in self._end_ids or len(self.tokens) == self.max_tokens
        return token


def generate(
    model: Transformer, texts: Sequence[Text], num_ids: int | None = None
) -> Iterator[tuple[int, int]]:
    """Continue texts until all have ended: (number of a text, id added to it), as they are made.

    A text's context is its last `seq_length` tokens. Chooses only ids below `num_ids`, where the
    tokenizer has fewer than the model. All tp ranks of a model call it alike and get the same.
    Raises DataError for an empty prompt or an id outside the vocabulary.
    """
    vocab = model.config.vocab_size
    for text in texts:
        if not text.tokens or not all(0 <= token < vocab for token in text.tokens):
            raise DataError(
                f"the prompt gives the token ids {text.tokens}; it must give one or more below "
                f"{vocab}: use a text that is not empty, and the run's own tokenizer"
            )
    return _ids(model, texts, num_ids)


def _ids(
    model: Transformer, texts: Sequence[Text], num_ids: int | None
) -> Iterator[tuple[int, int]]:
    length, device = model.seq_length, model.context.device

    def logits(contexts: Sequence[Sequence[int]], cache: Cache | None) -> torch.Tensor:
        token_T = torch.tensor([token for context in contexts for token in context], device=device)
        return model.text_logits(token_T, [len(context) for context in contexts], cache)

    def going(numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if not texts[number].ended]

    # The texts that fit are in the cache, whole at first and by their last token later.
    fits = [n for n in going(range(len(texts))) if len(texts[n].tokens) <= length]
    longest = max((min(length, texts[n].max_tokens) for n in fits), default=0)
    cache = Cache(len(fits), longest)
    while live := going(range(len(texts))):
        left = [n for n in fits if not texts[n].ended and len(texts[n].tokens) <= length]
        if len(left) < len(fits):
            cache.keep([fits.index(n) for n in left])
            fits = left
        whole = cache.is_empty
        outgrown = [n for n in live if n not in fits]
        parts = []
        if fits:
            contexts = [texts[n].tokens if whole else texts[n].tokens[-1:] for n in fits]
            parts.append(logits(contexts, cache))
        if outgrown:
            parts.append(logits([texts[n].tokens[-length:] for n in outgrown], None))
        for number, logits_V in zip([*fits, *outgrown], torch.cat(parts), strict=True):
            yield number, texts[number].choose(logits_V[:num_ids])
