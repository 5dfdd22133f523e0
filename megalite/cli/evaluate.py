"""`megalite eval`: losses of a checkpoint over datasets. Thin: options in, a table out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalite.cli.completion import one_of
from megalite.cli.options import AsJson, path
from megalite.errors import ConfigError
from megalite.wording import number_of

if TYPE_CHECKING:
    from megalite.train.launch import RankWork

_DEVICES = "auto|cpu|cuda"


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|hf:FOLDER",
            parser=path,
            help="A run folder, one of its checkpoints, or a Hugging Face folder.",
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PREFIX",
            help="Dataset to evaluate, whole; may be given several times (default: the run's own "
            "validation and test parts and eval.sets).",
        ),
    ] = None,
    batches: Annotated[
        int | None, typer.Option(metavar="N", help="Global batches of each set (default: all).")
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(metavar="N", help="Sequences at a time on a rank (default: the run's)."),
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a sample (default: the run's).")
    ] = None,
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
            metavar="FILE", parser=path, help="Tokenizer to count bytes by (default: the run's)."
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option(metavar="N", help="Tensor-parallel processes, which share each layer.")
    ] = 1,
    pp: Annotated[
        int, typer.Option(metavar="N", help="Pipeline-parallel processes, which share the layers.")
    ] = 1,
    dp: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Replicas (default: 1; under torchrun or srun as many as processes allow).",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar=_DEVICES,
            autocompletion=one_of(_DEVICES),
            help="Device to compute on (auto: GPUs, if there is one for each process).",
        ),
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Print loss, perplexity and bits per byte of a checkpoint.

    The layout need not be the one of training. Several processes are started here, unless torchrun
    or srun started them.
    """
    from megalite.process.launcher import device_kind, read_launch

    # Everything that can be wrong is reported before torch is imported.
    numbers = {
        "--batches": batches, "--micro-batch": micro_batch, "--seq-length": seq_length,
        "--tp": tp, "--pp": pp, "--dp": dp,
    }  # fmt: skip
    problems = [
        f"{name}={value} needs to be at least 1"
        for name, value in numbers.items()
        if value is not None and value < 1
    ]
    sets = [_named(each) for each in data or []]
    names = [name for name, _ in sets]
    problems += [
        f"--data: two sets are called {name}; give NAME=PREFIX"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    problems += [
        f"--data={prefix}: no file {prefix}.bin or {prefix}.idx below {Path.cwd()}; correct it"
        for _, prefix in sets
        if not (Path(f"{prefix}.bin").is_file() and Path(f"{prefix}.idx").is_file())
    ]
    launch, kind = read_launch(), device_kind(device)
    started = launch.source != "single"
    if dp is None and not problems:
        dp = max(1, launch.world_size // (tp * pp)) if started else 1
    if problems:
        raise ConfigError(problems)
    assert dp is not None

    from megalite.exchange.folder import open_weights
    from megalite.train.launch import run_ranks
    from megalite.train.score import ScoreRequest, score_config

    if started and launch.world_size != tp * pp * dp:
        raise ConfigError(
            f"--tp={tp} x --pp={pp} x --dp={dp} needs {number_of(tp * pp * dp, 'process')}, "
            f"{launch.source} "
            f"started {launch.world_size}; change the options or the number of processes"
        )
    request = ScoreRequest(
        source=source,
        step=step,
        weights="ema" if ema else "param",
        sets=sets,
        batches=batches,
        micro_batch=micro_batch,
        seq_length=seq_length,
        tokenizer=tokenizer,
    )
    config = score_config(open_weights(source, step=step), request, tp, pp, dp)
    code = run_ranks(
        _score_rank,
        config,
        launch,
        (request, as_json),
        local=not started and tp * pp * dp > 1,
        device=kind,
    )
    if code:
        raise typer.Exit(code)


def _score_rank() -> RankWork:
    from megalite.train.score import score_rank

    return score_rank


def _named(text: str) -> tuple[str, str]:
    """(name, prefix) of a --data: the name is the last part of the prefix, unless it is given."""
    name, separator, prefix = text.partition("=")
    prefix = path(prefix if separator else text)
    prefix = prefix.removesuffix(".bin").removesuffix(".idx")
    return (name if separator else Path(prefix).name), prefix
