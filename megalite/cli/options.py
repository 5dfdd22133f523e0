"""Arguments that several verbs take: a config, its settings, paths; and the command they form.

`~` at the start of a path stands for the user's home also where the shell leaves it, as in
`--out=~/data`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from megalite.cli.completion import completion, runs_from, settings_from
from megalite.errors import ConfigError, MegaliteError

_Command = TyperGroup | TyperCommand
_UNKNOWN = "megalite.unknown"  # in the context of a SettingsVerb: problems of its options


def path(text: str) -> str:
    """The path that an argument or option names: the parser of every one."""
    return expanduser(text)


def file(text: str) -> Path:
    """The file that an option names, as a Path."""
    return Path(path(text))


@contextmanager
def refused_paths() -> Iterator[None]:
    """Within it a path that the system refuses to look at is a ConfigError.

    `Path.is_file` and the like are False for a path that is not there, but raise where a folder
    above it may not be entered, or a name is too long.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
            raise
        raise ConfigError(
            f"{error.filename}: {error.strerror}; get the right to it, or give another path"
        ) from error


@contextmanager
def near_runs(*paths: Path) -> Iterator[None]:
    """Within it an error has a note with the runs that a path which is none may mean."""
    try:
        yield
    except MegaliteError as error:
        from megalite.checkpoint.names import meant_runs

        for path in paths:
            if meant := " or ".join(map(str, meant_runs(path))):
                error.add_note(f"{path}: did you mean {meant}?")
        raise


def require_suffix(option: str, path: Path, suffix: str) -> None:
    """Raise ConfigError where the name of a file to write has the suffix of another format."""
    if path.suffix.lower() not in ("", suffix):
        name = path.with_suffix(suffix)
        raise ConfigError(f"{option} writes a {suffix} file, not {path.suffix}: name it {name}")


def is_setting(text: str) -> bool:
    """True for `section.key=value`; the names of schedules may have "=" behind a colon."""
    return "=" in text and ":" not in text.partition("=")[0]


ConfigFile = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A TOML file, or a name that `megalite configs` lists.",
        autocompletion=completion(runs_from),
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.KEY=VALUE",
        help="Settings that replace the file's.",
        autocompletion=completion(settings_from),
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Number of GPUs, where the config leaves parallel.dp open."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the values as JSON.")]


class Group(TyperGroup):
    """Several verbs; the page of help ends with examples."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`. Raises ConfigError for all options before the verb that are unknown."""
        _require_known_options(self, ctx, args)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples of the group."""
        _write_examples(ctx, formatter)


class Verb(TyperCommand):
    """A verb: its page of help has names without types, and examples."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`. Raises ConfigError for all options that the verb lacks."""
        _require_known_options(self, ctx, args)
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line behind the verb."""
        pieces = ["[OPTIONS]"]
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                name = param.metavar if param.required else f"[{param.metavar}]"
                pieces.append(f"{name}..." if param.nargs == -1 else f"{name}")
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options."""
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                kind = param.param_type_name
                name = f"{param.metavar}" if kind == "argument" else record[0]
                rows[kind].append((name, record[1]))
        for kind, records in rows.items():
            if records:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the verb's examples."""
        _write_examples(ctx, formatter)


def _write_examples(ctx: Any, formatter: Any) -> None:
    """Write a section with the examples of the verb of a context, as they are."""
    from megalite.cli.examples import EXAMPLES

    words: list[str] = []
    while ctx.parent is not None:
        words.insert(0, ctx.info_name)
        ctx = ctx.parent
    with formatter.section("Examples"):
        indent = " " * formatter.current_indent
        formatter.write("".join(f"{indent}{line}\n" for line in EXAMPLES[" ".join(words)]))


class SettingsVerb(Verb):
    """A verb that takes settings: unknown options are left for it to report with the rest.

    Its function raises what `unknown_options` returns, beside what is wrong with the settings.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args` without the unknown options, whose problems are kept in the context.

        Raises ConfigError with them where no CONFIG can be told from their values.
        """
        unknown = _unknown_options(self, ctx, args)
        if not unknown:
            return super().parse_args(ctx, args)
        from megalite.config.names import flag_problem

        ctx.meta[_UNKNOWN] = problems = [
            flag_problem(flag, following) or _no_option(self, ctx, flag)
            for flag, following in unknown.values()
        ]
        # A word behind an unknown option may be its value, or not belong to it.
        values = {
            at + 1
            for at, (flag, following) in unknown.items()
            if "=" not in flag and following and not following.startswith("-")
        }
        kept = [at for at in range(len(args)) if at not in unknown]
        sure = [args[at] for at in kept if at not in values or is_setting(args[at])]
        try:
            return super().parse_args(ctx, sure)
        except typer.BadParameter:  # or none at all
            raise ConfigError(problems) from None


def unknown_options(ctx: typer.Context) -> None:
    """Raise ConfigError for the options of a SettingsVerb that are unknown."""
    if problems := ctx.meta.get(_UNKNOWN):
        raise ConfigError(problems)


def _require_known_options(verb: _Command, ctx: Any, args: list[str]) -> None:
    if unknown := _unknown_options(verb, ctx, args):
        raise ConfigError([_no_option(verb, ctx, flag) for flag, _ in unknown.values()])


def _unknown_options(verb: _Command, ctx: Any, args: list[str]) -> dict[int, tuple[str, str]]:
    """Position in `args` -> an option that the verb lacks, and the word behind it.

    Of a group only those before its verb count. None where a shell asks for completions.
    """
    if ctx.resilient_parsing:
        return {}
    takes_value = {
        name: not option.is_flag
        for option in _options(verb, ctx)
        for name in (*option.opts, *option.secondary_opts)
    }
    found: dict[int, tuple[str, str]] = {}
    skip = False
    for at, (arg, following) in enumerate(zip(args, [*args, ""][1:], strict=True)):
        name, equals, _ = arg.partition("=")
        if skip:  # the value of the option before
            skip = False
        elif arg == "--" or (isinstance(verb, Group) and not arg.startswith("-")):
            break
        elif name in takes_value:
            skip = takes_value[name] and not equals
        elif arg.startswith("-") and arg != "-":
            found[at] = arg, following
    return found


def _no_option(verb: _Command, ctx: Any, flag: str) -> str:
    """The message about an option that a verb lacks, with the nearest of those that it has."""
    name = flag.partition("=")[0]
    shown = [option for option in _options(verb, ctx) if not option.hidden]
    own = [name for option in shown for name in option.opts if name.startswith("--")]
    near = get_close_matches(name, own, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{name} is no option; {meant}options are {', '.join(own)}"


def _options(verb: _Command, ctx: Any) -> list[Any]:
    return [param for param in verb.get_params(ctx) if param.param_type_name == "option"]
