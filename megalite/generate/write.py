"""`megalite generate` after its options: opens model and tokenizer, continues prompts, prints them.

Tensor-parallel ranks all do the same; the first one prints.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megalite.config import RunConfig
from megalite.data.chat_template import ChatTemplate, Message
from megalite.data.tokenizer import Tokenizer, first_change
from megalite.distributed.agree import Ranks
from megalite.distributed.mesh import Mesh
from megalite.exchange.folder import open_weights
from megalite.generate.generate import Text, generate, load_model
from megalite.generate.pieces import Pieces
from megalite.generate.sampling import Sampling
from megalite.model.transformer import Transformer
from megalite.process.launcher import Launch
from megalite.train.rank import joined_mesh
from megalite.train.run_tokenizer import run_tokenizer


@dataclass(frozen=True)
class Request:
    """Prompts, each a text or the messages of a chat, and how they are continued.

    as_made: a single prompt is printed with its continuation as it is made; otherwise each becomes
    a JSON line, in order, for programs. batch: prompts that are continued side by side.
    """

    source: str  # a run, a checkpoint or hf:FOLDER
    step: int | None
    weights: str
    prompts: Sequence[str | Sequence[Message]]
    as_made: bool
    tokens: int
    sampling: Sampling
    stops: Sequence[str]
    batch: int
    tokenizer: str | None
    chat: bool  # by the template of a file, or the tokenizer's own
    template: Path | None


def generate_rank(launch: Launch, device: torch.device, config: RunConfig, request: Request) -> int:
    """One of the tensor-parallel ranks of `config`, inside its process group."""
    with joined_mesh(launch, device, config) as mesh:
        write_texts(mesh, request)
    return 0


def write_texts(mesh: Mesh, request: Request) -> None:
    """Continue the prompts of a request; all ranks of the mesh call it."""
    checkpoint = open_weights(request.source, Ranks(mesh.world), request.step)
    model, config = load_model(checkpoint, mesh, request.weights)
    tokenizer = run_tokenizer(checkpoint, config, request.tokenizer)
    template = ChatTemplate.of(tokenizer, request.template) if request.chat else None
    prompts = [_ids_of(each, tokenizer, template) for each in request.prompts]
    for prompt, ids in zip(request.prompts, prompts, strict=True):
        if isinstance(prompt, str) and template is None and mesh.rank == 0:
            _warn_of_change(prompt, ids, tokenizer)

    # A stop that is a special token never comes as text: it ends the text as an id.
    special = tokenizer.special_texts
    end_ids = {tokenizer.eos_id, *(special[stop] for stop in request.stops if stop in special)}
    stops = [stop for stop in request.stops if stop not in special]
    for first in range(0, len(prompts), request.batch):
        chosen = range(first, min(first + request.batch, len(prompts)))
        texts = [
            # A seed of its own for each text: it has the same continuation in any file.
            Text(
                prompts[number],
                request.tokens,
                dataclasses.replace(request.sampling, seed=request.sampling.seed + number),
                end_ids,
            )
            for number in chosen
        ]
        pieces = [Pieces(tokenizer, prompts[number], stops) for number in chosen]
        made = _pieces_of(model, texts, pieces, tokenizer.vocab_size)
        if request.as_made:
            _print_as_made(made, mesh.rank == 0, with_prompt=template is None, pieces=pieces[0])
        else:
            _print_lines(made, mesh.rank == 0, [request.prompts[n] for n in chosen], pieces)


def _ids_of(
    prompt: str | Sequence[Message], tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[int]:
    """The tokens of a prompt; with a template a text is what the user says."""
    if template is None:
        assert isinstance(prompt, str), "messages need a template"
        return [*tokenizer.prefix_ids, *tokenizer.encode(prompt)]
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    ids, _ = tokenizer.encode_special(template.prompt(chat))
    return [int(number) for number in ids]


def _warn_of_change(prompt: str, ids: Sequence[int], tokenizer: Tokenizer) -> None:
    if (decoded := tokenizer.decode(ids)) != prompt:
        change = first_change(prompt, decoded)
        text = f"warning: tokenizer {tokenizer.files.path} changes the prompt: {change}"
        print(text, file=sys.stderr, flush=True)


def _pieces_of(
    model: Transformer, texts: Sequence[Text], pieces: Sequence[Pieces], num_ids: int
) -> Iterator[tuple[int, str]]:
    """(number of a text, the next piece of it) as they are made, the prompts' own first."""
    continued = generate(model, texts, num_ids)  # refuses prompts before anything is printed
    yield from ((number, each.add()) for number, each in enumerate(pieces))
    for number, token in continued:
        yield number, pieces[number].add(token)
        texts[number].ended = texts[number].ended or pieces[number].stopped
        if texts[number].ended:
            yield number, pieces[number].rest()


def _print_as_made(
    made: Iterator[tuple[int, str]], prints: bool, *, with_prompt: bool, pieces: Pieces
) -> None:
    """A text with its prompt, piece by piece; of a chat the answer alone."""
    left_out = 0 if with_prompt else len(pieces.start)
    try:
        for _, piece in made:
            shown, left_out = piece[left_out:], max(0, left_out - len(piece))
            if prints:
                print(shown, end="", flush=True)
    finally:
        if prints:
            print(flush=True)  # interrupted, too: the message has a line of its own


def _print_lines(
    made: Iterator[tuple[int, str]],
    prints: bool,
    prompts: Sequence[str | Sequence[Message]],
    pieces: Sequence[Pieces],
) -> None:
    """A JSON line for each text, in order, when all of them are whole."""
    whole = ["" for _ in prompts]
    for number, piece in made:
        whole[number] += piece
    for prompt, text, each in zip(prompts, whole, pieces, strict=True):
        key = "prompt" if isinstance(prompt, str) else "messages"
        line = {key: prompt, "completion": text[len(each.start) :]}
        if prints:
            print(json.dumps(line, ensure_ascii=sys.stdout.encoding.lower() != "utf-8"), flush=True)
