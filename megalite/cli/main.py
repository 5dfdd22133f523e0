"""The command line: one thin function per verb, which imports what it needs when it runs.

So `megalite --help` loads neither torch nor numpy, and a mistake in a config is reported before
torch is imported. Errors that the user can fix (MegaliteError) end here: one "error:" line each on
stderr, a "note:" line for each of their notes, exit code 2, no traceback.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from megalite import __version__
from megalite.cli.configs import configs
from megalite.cli.data.prepare import app as data_app
from megalite.cli.doctor import doctor
from megalite.cli.generate import generate
from megalite.cli.info import info
from megalite.cli.options import ConfigFile, Overrides, SettingsCommand
from megalite.cli.plan import plan
from megalite.cli.report import report
from megalite.cli.schedule import schedule
from megalite.errors import EXIT_INTERRUPTED, EXIT_USER, ConfigError, MegaliteError
from megalite.process.terminal import replace_unencodable

if TYPE_CHECKING:
    from megalite.config import RunConfig


class _ErrorsToLines(TyperGroup):
    """Turns a MegaliteError of any verb into lines on stderr, and Ctrl-C into one."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MegaliteError as error:
            if ctx.params["traceback"]:
                raise
            for line in _lines(error):
                typer.echo(line, err=True)
            raise typer.Exit(EXIT_USER) from None
        except KeyboardInterrupt:
            typer.echo("error: interrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    name="megalite",
    help="Train transformers that are too large for one GPU.",
    cls=_ErrorsToLines,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _root(
    traceback: Annotated[bool, typer.Option("--traceback", hidden=True)] = False,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    pass


@app.command(cls=SettingsCommand)
def train(
    ctx: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    local: Annotated[
        bool, typer.Option("--local", help="Start the processes here, on the CPU or GPUs.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the run, and of its folder; same as name=NAME.")
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[,KEY]",
            help="Go on from a checkpoint although these settings have changed; all-listed: all "
            "that may.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show each value and its origin, and stop.")
    ] = False,
) -> None:
    """Train the model that CONFIG describes."""
    from megalite.process.launcher import is_first_on_host

    try:
        _train(ctx, config, overrides or [], local, name, accept or [], print_config)
    except MegaliteError:
        # The first process of a host prints for those that were started with it.
        if local or is_first_on_host():
            raise
        raise typer.Exit(EXIT_USER) from None


def _train(
    ctx: typer.Context,
    config: str,
    overrides: list[str],
    local: bool,
    name: str | None,
    accept: list[str],
    print_config: bool,
) -> None:
    from megalite.checks import open_run
    from megalite.checks.packages import missing_extras
    from megalite.config.inputs import missing_inputs, prepare_words
    from megalite.config.names import toml_value
    from megalite.config.resume import accepted
    from megalite.config.text import format_config
    from megalite.process.launcher import read_launch
    from megalite.process.signals import SignalFlag

    flag = ctx.with_resource(SignalFlag())  # first of all: a signal from now on is remembered
    allowed = accepted(accept)
    settings = list(overrides)
    if name is not None:
        settings.append(f"name={toml_value(name)}")

    # Where the run will be started is not known here, so parallel.dp may stay open.
    if print_config:
        return typer.echo(format_config(open_run(config, settings, keep_dp_open=not local)))

    # A lone process may be one that should have been started by a launcher: `train_command` looks.
    launch = read_launch()
    if not local:
        flag.place(launch)
    alone = launch.source == "single" and not local
    world_size = None if local or alone else launch.world_size
    missing = partial(missing_inputs, prepared=local and launch.source == "single")
    inputs = (missing_extras, missing, _start_problems)
    run = open_run(config, settings, world_size, keep_dp_open=alone, more=inputs)
    if words := prepare_words(run.config):
        from megalite.cli.data.missing import run_prepare

        run_prepare(words)
        run = open_run(config, settings, more=(missing_inputs, _start_problems))

    from megalite.train.launch import train_command

    train_command(run.config, launch, local=local, accept=allowed, flag=flag)


def _start_problems(config: RunConfig) -> list[str]:
    """`start_problems`, imported only when the settings could be read: it needs numpy."""
    from megalite.train.start_checks import start_problems

    return start_problems(config)


app.command()(configs)
app.command()(generate)
app.command()(info)
app.command()(report)
app.command()(doctor)
app.command()(schedule)
app.command(cls=SettingsCommand)(plan)


@app.command()
def version() -> None:
    """Print megalite's version."""
    typer.echo(f"megalite {__version__}")


def main() -> None:
    """Run the command line. Characters that standard output cannot have are replaced."""
    replace_unencodable()
    app()


def _lines(error: MegaliteError) -> list[str]:
    problems = error.problems if isinstance(error, ConfigError) else str(error).splitlines()
    notes = getattr(error, "__notes__", ())
    return [*(f"error: {problem}" for problem in problems), *(f"note: {note}" for note in notes)]
