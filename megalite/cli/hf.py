"""`megalite hf`: models of Hugging Face folders, in and out. Thin: options in, lines out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalite.cli.completion import one_of
from megalite.cli.options import Group, Verb, path
from megalite.errors import ConfigError

if TYPE_CHECKING:
    from megalite.distributed.agree import Ranks
    from megalite.process.launcher import Launch

_DTYPES = "float32|bfloat16|float16"
_TIMEOUT_S = 3600.0  # that a rank may need for its files
_NAMES = "transformers|megatron-core"

app = typer.Typer(
    cls=Group,
    help="Convert models from and to Hugging Face folders.",
    no_args_is_help=True,
)
Check = Annotated[
    bool,
    typer.Option(
        "--check", help="Compare logits with transformers, which holds both models in memory."
    ),
]


@app.command("import", cls=Verb)
def import_(
    folder: Annotated[
        str,
        typer.Argument(metavar="FOLDER", parser=path, help="Folder with config.json and weights."),
    ],
    out: Annotated[
        str, typer.Argument(metavar="OUT", parser=path, help="Folder to make; must not exist.")
    ],
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Key of config.json, or tensor, to leave out. Repeats."),
    ] = None,
    check: Check = False,
) -> None:
    """Convert a Hugging Face folder to a checkpoint and a [model] table.

    OUT is accepted by checkpoint.load_weights, generate, info and hf export, and
    OUT/model.toml as base of a config.
    """
    from megalite.checkpoint.find import open_checkpoint
    from megalite.exchange.convert import convert
    from megalite.exchange.folder import open_folder

    source = open_folder(Path(folder), ignore=frozenset(ignore or ()))
    for line in (*source.notes, *convert(source, Path(out))):
        typer.echo(line)
    if check:
        from megalite.generate.stock import check_logits

        typer.echo(check_logits(open_checkpoint(Path(out)), Path(folder), "param", None))


@app.command("export", cls=Verb)
def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT", parser=path, help="A run folder, or one of its checkpoints."
        ),
    ],
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", parser=path, help="Folder to make; must not exist.")
    ],
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Step of the checkpoint to use (default: the newest sound one)."
        ),
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="Use the average of the weights that the run kept.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar=_DTYPES,
            autocompletion=one_of(_DTYPES),
            help="Type of the weights (default: the type that they are saved in).",
        ),
    ] = None,
    names: Annotated[
        str,
        typer.Option(metavar=_NAMES, autocompletion=one_of(_NAMES), help="Names of the tensors."),
    ] = "transformers",
    check: Check = False,
) -> None:
    """Convert a checkpoint to a folder that transformers loads as it is.

    Started by torchrun or srun, its processes share the files.
    """
    from megalite.process.launcher import read_launch

    launch = read_launch()
    by_ranks = launch.world_size > 1
    _require(dtype, names, check, by_ranks)

    from megalite.distributed.agree import ALONE
    from megalite.exchange.export import export as write
    from megalite.exchange.folder import open_weights

    weights, megatron = "ema" if ema else "param", names == "megatron-core"

    def work(ranks: Ranks) -> list[str]:
        found = open_weights(run, ranks, step)
        options: Any = {"weights": weights, "dtype": dtype, "megatron": megatron}
        lines = [*found.notes, *write(found, Path(folder), **options, ranks=ranks)]
        if check:
            from megalite.generate.stock import check_logits

            lines.append(check_logits(found, Path(folder), weights, dtype))
        return lines

    if by_ranks:
        return _run_rank(launch, work)
    for line in work(ALONE):
        typer.echo(line)


def _require(dtype: str | None, names: str, check: bool, by_ranks: bool) -> None:
    """Raise ConfigError, all problems at once, for options that cannot be."""
    problems = []
    if dtype is not None and dtype not in _DTYPES.split("|"):
        problems.append(f"--dtype={dtype}: use {_DTYPES.replace('|', ' or ')}")
    if names not in _NAMES.split("|"):
        problems.append(f"--names={names}: use {_NAMES.replace('|', ' or ')}")
    elif check and names == "megatron-core":
        problems.append("--check: transformers does not load --names=megatron-core; leave one out")
    if check and by_ranks:
        problems.append("--check compares in one process; leave it out under a launcher")
    if problems:
        raise ConfigError(problems)


def _run_rank(launch: Launch, work: Callable[[Ranks], list[str]]) -> None:
    """Do `work` with the other processes of a launcher, and end this one."""
    import torch

    from megalite.distributed.agree import Ranks
    from megalite.distributed.mesh import Mesh
    from megalite.layout.topology import Topology
    from megalite.train.rank import run_rank_and_exit

    def rank(launch: Launch, device: torch.device) -> int:
        mesh = Mesh(Topology(dp=launch.world_size), device, timeout_s=_TIMEOUT_S)
        mesh.create()
        lines = work(Ranks(mesh.world))
        if launch.rank == 0:
            typer.echo("\n".join(lines))
        return 0

    run_rank_and_exit(rank, launch, torch.device("cpu"), (), _TIMEOUT_S)
