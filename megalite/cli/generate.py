"""`megalite generate`: continue texts with a run's checkpoint. Thin: options in, texts out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalite.cli.completion import one_of
from megalite.cli.options import near_runs, path
from megalite.errors import ConfigError, DataError
from megalite.wording import number_of

if TYPE_CHECKING:
    from megalite.generate.write import Request
    from megalite.train.launch import RankWork

_DEVICES = "cpu|cuda"
_PROMPT = "def "
_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 50, 1.0
_BATCH = 8


def generate(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|hf:FOLDER",
            parser=path,
            help="A run folder, one of its checkpoints, or a Hugging Face folder.",
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
            help="Texts to continue: one a line, or JSON lines with a key prompt (.jsonl), or "
            "messages for a chat. Prints JSON lines; text i, from 0, is drawn with seed + i.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N", help=f"Texts of --prompts that are continued at once (default: {_BATCH})."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask in a chat, by the tokenizer's own template.")
    ] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            parser=path,
            help="As --chat, by a template for jinja, or a tokenizer_config.json that has one.",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; may be given several times."),
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
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", parser=path, help="Tokenizer to use (default: the run's own)."
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Start N processes here that share each layer. Under torchrun or srun all take "
            "part.",
        ),
    ] = None,
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
    problems += _more_problems(prompts, batch, stop or [], tp)
    if problems:
        raise ConfigError(problems)
    chat = chat or chat_template is not None
    texts = [_PROMPT if prompt is None else prompt] if prompts is None else None

    from megalite.generate.sampling import Sampling
    from megalite.generate.write import Request

    if temperature is None:
        temperature = 0.0 if greedy else _TEMPERATURE
    try:
        sampling = Sampling(
            temperature=temperature,
            top_k=_TOP_K if top_k is None else top_k,
            top_p=_TOP_P if top_p is None else top_p,
            seed=seed,
        )
    except ConfigError as error:  # which names values of Sampling, each an option here
        named = (problem.partition("=") for problem in error.problems)
        raise ConfigError(
            [f"--{name.replace('_', '-')}={rest}" for name, _, rest in named]
        ) from None
    request = Request(
        source=run,
        step=step,
        weights="ema" if ema else "param",
        prompts=texts if texts is not None else _read(Path(str(prompts)), chat),
        as_made=prompts is None,
        tokens=tokens,
        sampling=sampling,
        stops=stop or [],
        batch=_BATCH if batch is None else batch,
        tokenizer=tokenizer,
        chat=chat,
        template=None if chat_template is None else Path(chat_template),
    )
    with near_runs(Path(run)):
        _run(request, tp, device)


def _run(request: Request, tp: int | None, device: str) -> None:
    """Continue the texts here, on processes that are started here, or on those of a launcher."""
    import torch

    from megalite.distributed.mesh import Mesh
    from megalite.exchange.folder import open_weights
    from megalite.generate.generate import text_config
    from megalite.generate.write import write_texts
    from megalite.layout.topology import Topology
    from megalite.process.launcher import device_kind, read_launch
    from megalite.train.launch import run_ranks

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: this torch sees no CUDA device; leave it out")
    launch = read_launch()
    started = launch.source != "single"
    if started and tp not in (None, launch.world_size):
        raise ConfigError(
            f"--tp={tp}, but {launch.source} started "
            f"{number_of(launch.world_size, 'process')}, which all "
            "take part; leave --tp out"
        )
    size = launch.world_size if started else tp or 1
    if size == 1:
        return write_texts(Mesh(Topology(), torch.device(device)), request)

    config = text_config(open_weights(request.source, step=request.step), size)
    code = run_ranks(
        _generate_rank, config, launch, (request,), local=not started, device=device_kind(device)
    )
    if code:
        raise typer.Exit(code)


def _generate_rank() -> RankWork:
    from megalite.generate.write import generate_rank

    return generate_rank


def _more_problems(
    prompts: str | None, batch: int | None, stops: list[str], tp: int | None
) -> list[str]:
    problems = []
    if batch is not None and prompts is None:
        problems.append(f"--batch={batch} has no effect without --prompts; leave it out")
    if batch is not None and batch < 1:
        problems.append(f"--batch={batch} needs to be at least 1")
    if "" in stops:
        problems.append("--stop is empty; give the text that ends the answer")
    if tp is not None and tp < 1:
        problems.append(f"--tp={tp} needs to be at least 1")
    return problems


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


def _read(file: Path, chat: bool) -> list[str | list[dict[str, str]]]:
    """The prompts of a file, one a line; blank lines are left out."""
    try:
        # Not splitlines(): it also cuts at U+2028 and others, which JSON keeps inside a text.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompts={file} cannot be read: {error}") from None
    texts = [
        _prompt_of(line, f"{file}, line {number}", chat) if file.suffix == ".jsonl" else line
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not texts:
        raise DataError(f"--prompts={file} holds no prompt; write one a line")
    return texts


def _prompt_of(line: str, position: str, chat: bool) -> str | list[dict[str, str]]:
    """The prompt or the messages of a JSON line; `position` names the line in the error."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    found = record if isinstance(record, dict) else {}
    prompt, messages = found.get("prompt"), found.get("messages")
    if isinstance(prompt, str):
        return prompt
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        if chat:
            return messages
        raise DataError(f"{position}: holds messages, which need --chat")
    raise DataError(
        f"{position}: needs a JSON object with a text under the key prompt, or a list of "
        "messages, each with role and content, under the key messages"
    )


def _is_message(value: object) -> bool:
    """True for {"role": text, "content": text}, perhaps with more."""
    named = value if isinstance(value, dict) else {}
    return isinstance(named.get("role"), str) and isinstance(named.get("content"), str)
