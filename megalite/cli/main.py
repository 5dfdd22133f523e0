"""The command line: one thin function per verb, which imports what it needs when it runs.

So `megalite --help` loads neither torch nor numpy, and a mistake in a config is reported before
torch is imported. Errors that the user can fix (MegaliteError) end here: one "error:" line each on
stderr, a "note:" line for each of their notes, exit code 2, no traceback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalite import __version__
from megalite.cli.completion import accepted_from, completion, one_of, shell_words
from megalite.cli.configs import configs
from megalite.cli.data.prepare import app as data_app
from megalite.cli.doctor import doctor
from megalite.cli.evaluate import evaluate
from megalite.cli.generate import generate
from megalite.cli.hf import app as hf_app
from megalite.cli.info import info
from megalite.cli.options import (
    ConfigFile,
    Group,
    Settings,
    SettingsVerb,
    Verb,
    refused_paths,
    unknown_options,
)
from megalite.cli.plan import plan
from megalite.cli.report import report
from megalite.cli.schedule import schedule
from megalite.errors import EXIT_INTERRUPTED, EXIT_USER, ConfigError, MegaliteError, all_of
from megalite.process.terminal import open_closed, replace_unencodable, reported_output

if TYPE_CHECKING:
    from megalite.config import RunConfig
    from megalite.process.launcher import Launch

_DEVICES = "auto|cpu|cuda"

# The verbs in the order in which they are listed.
_VERBS = (
    "train",
    "data",
    "configs",
    "plan",
    "report",
    "eval",
    "generate",
    "hf",
    "info",
    "schedule",
    "doctor",
    "version",
)


class _Megalite(Group):
    """Lists the verbs; turns a MegaliteError of any of them into lines, and Ctrl-C into one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=_VERBS.index)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        try:
            with _ctrl_c_to_a_line():
                return super().make_context(*args, **extra)
        except ConfigError as error:
            raise _printed(error) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            with _ctrl_c_to_a_line(), refused_paths():
                return super().invoke(ctx)
        except MegaliteError as error:
            if ctx.params["traceback"]:
                raise
            raise _printed(error) from None


def _printed(error: MegaliteError) -> typer.Exit:
    """Print an error's lines on stderr; returns what ends the process."""
    with contextlib.suppress(OSError):  # stderr on a full disk: the exit code is left
        for line in _lines(error):
            typer.echo(line, err=True)
    return typer.Exit(EXIT_USER)


@contextlib.contextmanager
def _ctrl_c_to_a_line() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:  # typer would end without a word
        typer.echo("error: interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    name="megalite",
    help="Train transformers that are too large for one GPU.",
    cls=_Megalite,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")
app.add_typer(hf_app, name="hf")


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _root(
    traceback: Annotated[bool, typer.Option("--traceback", hidden=True)] = False,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command(cls=SettingsVerb)
def train(
    ctx: typer.Context,
    config: ConfigFile,
    settings: Settings = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local", help="Start all processes on this machine, on its GPUs or its CPU."
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            metavar=_DEVICES,
            autocompletion=one_of(_DEVICES),
            help="Device to compute on (auto: GPUs, if there is one for each process).",
        ),
    ] = "auto",
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the run and of its folder, as name=NAME."),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[,KEY]",
            autocompletion=completion(accepted_from),
            help="Resume although these settings have changed; all-listed: all that may change.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print each setting with its origin, and exit.")
    ] = False,
) -> None:
    """Train the model that a config describes.

    A run whose folder has checkpoints is resumed. Without --local this is one process of torchrun
    or srun, or the only one. Exit codes: 0 finished, 75 saved on a signal (start it again),
    2 refused, 1 failed, 128 + n killed by signal n.
    """
    from megalite.process.launcher import is_first_on_host

    try:
        with refused_paths():
            _train(ctx, config, settings or [], local, device, name, accept or [], print_config)
    except MegaliteError:
        # The first process of a host prints for those that were started with it.
        if local or is_first_on_host():
            raise
        raise typer.Exit(EXIT_USER) from None


def _train(
    ctx: typer.Context,
    config: str,
    settings: list[str],
    local: bool,
    device: str,
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
    from megalite.process.launcher import device_kind, read_launch
    from megalite.process.signals import SignalFlag

    flag = ctx.with_resource(SignalFlag())  # first of all: a signal from now on is remembered
    if name is not None:
        settings = [*settings, f"name={toml_value(name)}"]
    options = (
        partial(unknown_options, ctx),
        partial(accepted, accept),
        partial(device_kind, device),
    )

    # Where the run will be started is not known here, so parallel.dp may stay open.
    if print_config:
        checked = partial(open_run, config, settings, keep_dp_open=not local)
        return typer.echo(format_config(all_of(*options, checked)[-1]))

    # A lone process may be one of several that a launcher should have started, with a parallel.dp
    # that is not known here.
    launch = read_launch()
    if not local:
        flag.place(launch)
    alone = launch.source == "single" and not local
    world_size = None if local or alone else launch.world_size
    missing = partial(missing_inputs, prepared=local and launch.source == "single")
    inputs = (missing_extras, missing, partial(_start_problems, launch=launch, local=local))
    checked = partial(open_run, config, settings, world_size, keep_dp_open=alone, more=inputs)
    _, allowed, kind, run = all_of(*options, checked)
    if words := prepare_words(run.config):
        from megalite.cli.data.missing import run_prepare

        run_prepare(words)
        run = open_run(config, settings, more=(missing_inputs, inputs[-1]))

    from megalite.train.launch import train_command

    train_command(run.config, launch, local=local, device=kind, accept=allowed, flag=flag)


def _start_problems(config: RunConfig, launch: Launch, local: bool) -> list[str]:
    """Problems at the start, imported only when the settings could be read: it needs numpy."""
    from megalite.train.start_checks import launcher_problems, start_problems

    return [*launcher_problems(config, launch, local), *start_problems(config)]


app.command(cls=Verb)(configs)
app.command(cls=SettingsVerb)(plan)
app.command(cls=Verb)(report)
app.command("eval", cls=Verb)(evaluate)
app.command(cls=Verb)(generate)
app.command(cls=Verb)(info)
app.command(cls=SettingsVerb)(schedule)
app.command(cls=Verb)(doctor)


@app.command(cls=Verb)
def version() -> None:
    """Print the version."""
    typer.echo(f"megalite {__version__}")


def main() -> None:
    """Run the command line. Characters that standard output cannot have are replaced."""
    open_closed()
    replace_unencodable()
    with reported_output(), shell_words() as kept:
        app(obj=kept)


def _lines(error: MegaliteError) -> list[str]:
    problems = error.problems if isinstance(error, ConfigError) else str(error).splitlines()
    notes = getattr(error, "__notes__", ())
    lines = [*(f"error: {problem}" for problem in problems), *(f"note: {note}" for note in notes)]
    return [_printable(line) for line in lines]


def _printable(line: str) -> str:
    """A line with escapes for what could move a terminal's cursor, as keys of a file may."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
