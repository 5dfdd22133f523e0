"""`megalite generate`: continue texts with a run's checkpoint. Thin: options in, texts out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalite.cli.completion import one_of
from megalite.cli.options import path
from megalite.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megalite.generate.sampling import Sampling

_DEVICES = "cpu|cuda"
_PROMPT = "def "
_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 50, 1.0


def generate(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT", parser=path, help="A run folder, or one of its checkpoints."
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help=f"Text to continue (default: {_PROMPT!r})."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            parser=path,
            help="Texts to continue: one a line, or JSON lines with a key prompt (.jsonl). "
            "Prints JSON lines; text i, from 0, is drawn with seed + i.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="Tokens to add at most.")
    ] = 128,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Take the likeliest token each time.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help=f"Divides the logits before a draw (default: {_TEMPERATURE}); 0: as --greedy.",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="N", help=f"Draw among the N likeliest tokens; 0: all (default: {_TOP_K})."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Draw among the likeliest tokens that together have this probability "
            f"(default: {_TOP_P:g}, all).",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same text.")] = 0,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Step of the checkpoint to use (default: the newest sound one)."
        ),
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="Use the average of the weights that the run kept.")
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            metavar=_DEVICES, autocompletion=one_of(_DEVICES), help="Device to compute on."
        ),
    ] = "cpu",
) -> None:
    """Continue texts with a run's checkpoint.

    The text is printed as it is made. The newest sound checkpoint of a run is used, and its own
    tokenizer.
    """
    # Everything that can be wrong is reported before torch is imported.
    problems = _problems(prompt, prompts, tokens, greedy, temperature, top_k, top_p, device)
    if problems:
        raise ConfigError(problems)
    texts = [_PROMPT if prompt is None else prompt] if prompts is None else _read(Path(prompts))

    from megalite.generate.sampling import Sampling

    if temperature is None:
        temperature = 0.0 if greedy else _TEMPERATURE
    sampling = Sampling(
        temperature=temperature,
        top_k=_TOP_K if top_k is None else top_k,
        top_p=_TOP_P if top_p is None else top_p,
        seed=seed,
    )
    continued = _continue(run, step, texts, tokens, sampling, ema, device)

    # A single prompt is printed with its continuation as it is made; several become JSON lines for
    # programs, each when its text is whole.
    for text, (start, pieces) in zip(texts, continued, strict=True):
        if prompts is None:
            _print_as_made(pieces)
        else:
            line = {"prompt": text, "completion": "".join(pieces)[len(start) :]}
            typer.echo(json.dumps(line, ensure_ascii=sys.stdout.encoding.lower() != "utf-8"))


def _print_as_made(pieces: Iterator[str]) -> None:
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        print(flush=True)  # interrupted, too: the message has a line of its own


def _problems(
    prompt: str | None,
    prompts: str | None,
    tokens: int,
    greedy: bool,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    device: str,
) -> list[str]:
    """One line for each option that is wrong, or has no effect beside another."""
    problems = []
    if prompt is not None and prompts is not None:
        problems.append("--prompt and --prompts are both given; leave one out")
    if tokens < 1:
        problems.append(f"--tokens={tokens} needs to be at least 1")
    if device not in ("cpu", "cuda"):
        problems.append(f"--device={device} needs to be cpu or cuda")

    # Options without an effect are refused: the user expects one.
    if greedy and temperature is not None:
        problems.append(f"--temperature={temperature:g} has no effect with --greedy; leave one out")
    likeliest = "--greedy" if greedy else "--temperature=0" if temperature == 0 else None
    for name, value in (("--top-k", top_k), ("--top-p", top_p)):
        if likeliest is not None and value is not None:
            problems.append(
                f"{name}={value:g} has no effect with {likeliest}, which takes the likeliest "
                "token; leave one out"
            )
    return problems


def _read(file: Path) -> list[str]:
    """The prompts of a file, one a line; blank lines are left out."""
    try:
        # Not splitlines(): it also cuts at U+2028 and others, which JSON keeps inside a text.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompts={file} cannot be read: {error}") from None
    texts = [
        _prompt_of(line, f"{file}, line {number}") if file.suffix == ".jsonl" else line
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not texts:
        raise DataError(f"--prompts={file} holds no prompt; write one a line")
    return texts


def _prompt_of(line: str, position: str) -> str:
    """The prompt of a JSON line; `position` names the line in the error."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise DataError(f"{position}: needs a JSON object with a text under the key prompt")
    return prompt


def _continue(
    run: str,
    step: int | None,
    texts: list[str],
    tokens: int,
    sampling: Sampling,
    ema: bool,
    device: str,
) -> list[tuple[str, Iterator[str]]]:
    """For each text: the text as the tokenizer reads it, and the pieces of it and what follows.

    Nothing is made before the pieces are asked for, but all texts have been checked.
    """
    import dataclasses

    import torch

    from megalite.checkpoint.find import find_checkpoint
    from megalite.data.tokenizer import first_change
    from megalite.generate.generate import generate as sample
    from megalite.generate.generate import load_model, load_tokenizer, text_pieces

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: this torch sees no CUDA device; leave it out")
    checkpoint = find_checkpoint(Path(run), step=step)
    model, config = load_model(checkpoint, torch.device(device), "ema" if ema else "param")
    tokenizer = load_tokenizer(config)

    # A seed of its own for each text: the same text gives the same continuation in any file.
    continued = []
    for index, text in enumerate(texts):
        ids = [*tokenizer.prefix_ids, *tokenizer.encode(text)]
        if (decoded := tokenizer.decode(ids)) != text:
            change = first_change(text, decoded)
            typer.echo(
                f"warning: tokenizer {tokenizer.files.path} changes the prompt: {change}", err=True
            )
        added = sample(
            model,
            ids,
            tokens,
            dataclasses.replace(sampling, seed=sampling.seed + index),
            eos_id=tokenizer.eos_id,
            num_ids=tokenizer.vocab_size,
        )
        continued.append((decoded, text_pieces(tokenizer, ids, added)))
    return continued
