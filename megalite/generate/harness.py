"""A megalite model for lm-evaluation-harness; needs its package lm_eval (extra lm-eval).

`python -m megalite.generate.harness run --model megalite --model_args source=RUN --tasks NAME` is
the command line of the harness, which knows the model by then; on CPU it takes `--device cpu`.
Texts become tokens as the harness has it for transformers: special tokens in them become ids, and
bos comes first where the tokenizer says so. One process on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megalite.distributed.mesh import Mesh
from megalite.errors import ConfigError
from megalite.exchange.folder import open_weights
from megalite.generate.generate import Text, generate, load_model
from megalite.generate.pieces import Pieces
from megalite.generate.sampling import Sampling
from megalite.layout.topology import Topology
from megalite.train.run_tokenizer import run_tokenizer

T = TypeVar("T")
Scored = tuple[Any, list[int], list[int]]  # texts as the harness knows them, context, continuation


@register_model("megalite")
class MegaliteLM(TemplateLM):  # type: ignore[misc]
    """The model of a run, a checkpoint or `hf:FOLDER`.

    Arguments are those of `--model_args`: `source`; `step`, `tokenizer` and `ema=True` as of
    `megalite generate`; `max_length` in tokens, at most the model's own.
    """

    def __init__(
        self,
        source: str,
        step: int | None = None,
        ema: bool = False,
        tokenizer: str | None = None,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self._device = torch.device(device or "cpu")
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device={device}: this torch sees no CUDA device; use --device cpu")
        checkpoint = open_weights(source, step=step)
        mesh = Mesh(Topology(), self._device)
        self._model, config = load_model(checkpoint, mesh, "ema" if ema else "param")
        self._tokenizer = run_tokenizer(checkpoint, config, tokenizer)
        self.max_length = min(max_length or self._model.seq_length, self._model.seq_length)
        given = str(batch_size)
        self._batch = int(given) if given.isdigit() else 8

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a text that has no context: bos, or eos where there is none."""
        bos = self._tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """A name of the tokenizer for caches of requests."""
        return f"megalite-{self._tokenizer.files.sha256[:12]}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **more: Any
    ) -> list[int]:
        """Token ids; the prefix comes first unless it is there, or not wanted."""
        ids = [int(number) for number in self._tokenizer.encode_special(string)[0]]
        prefix = [] if add_special_tokens is False else self._tokenizer.prefix_ids
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **more: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        # Texts of about one length go together.
        order = sorted(range(len(requests)), key=lambda n: -sum(map(len, requests[n][1:])))
        for numbers in _batches(order, self._batch):
            inputs: list[list[int]] = []
            rows: list[int] = []
            first = 0
            for number in numbers:
                _, context, continuation = requests[number]
                ids = (context + continuation)[-(self.max_length + 1) :][:-1]
                first += len(ids)
                rows += range(first - len(continuation), first)
                inputs.append(ids)
            token_T = torch.tensor([t for ids in inputs for t in ids], device=self._device)
            row = torch.tensor(rows, device=self._device)
            logits = self._model.text_logits(token_T, [len(ids) for ids in inputs], rows=row)
            logprobs, greedy = logits.log_softmax(-1), logits.argmax(-1).tolist()
            place = 0
            for number in numbers:
                texts, _, wanted = requests[number]
                span = slice(place, place + len(wanted))
                chosen = logprobs[span].gather(1, torch.tensor(wanted, device=row.device)[:, None])
                found[number] = (float(chosen.sum()), greedy[span] == wanted)
                place += len(wanted)
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, found[number])
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length` tokens."""
        results = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            scored = [(None, *make_disjoint_window(window)) for window in windows]
            results.append(sum(value for value, _ in self._loglikelihood_tokens(scored)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), results[-1])
        return results

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Continue texts up to one of their stops, greedily unless a request asks for draws."""
        arguments = [request.args for request in requests]
        results: list[str] = []
        for several in _batches(arguments, self._batch):
            texts, pieces = [], []
            for context, options in several:
                kwargs: dict[str, Any] = normalize_gen_kwargs(options)
                tokens = min(kwargs["max_gen_toks"], self.max_length - 1)
                prompt = self.tok_encode(context)[-(self.max_length - tokens) :]
                temperature = kwargs.get("temperature", 1.0) if kwargs["do_sample"] else 0.0
                draw = Sampling(
                    temperature=float(temperature),
                    top_k=int(kwargs.get("top_k") or 0),
                    top_p=float(kwargs.get("top_p") or 1.0),
                )
                texts.append(Text(prompt, tokens, draw, {self.eot_token_id}))
                pieces.append(Pieces(self._tokenizer, prompt, [s for s in kwargs["until"] if s]))
            made = [each.add() for each in pieces]
            for number, token in generate(self._model, texts, self._tokenizer.vocab_size):
                made[number] += pieces[number].add(token)
                texts[number].ended = texts[number].ended or pieces[number].stopped
            for number, (each, call) in enumerate(zip(pieces, several, strict=True)):
                results.append((made[number] + each.rest())[len(each.start) :])
                self.cache_hook.add_partial("generate_until", call, results[-1])
        return results


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


if __name__ == "__main__":
    cli_evaluate()
