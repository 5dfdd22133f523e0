"""Arguments that several verbs take: a config, its settings, paths; and the command they form.

`~` at the start of a path stands for the user's home also where the shell leaves it, as in
`--out=~/data`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from megalite.cli.completion import completion, runs_from, settings_from
from megalite.errors import ConfigError


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

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples of the group."""
        _write_examples(ctx, formatter)


class Verb(TyperCommand):
    """A verb: its page of help has names without types, and examples."""

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
    """A verb that takes settings: those written as options are reported, all at once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`. Raises ConfigError for settings among the options, of any framework.

        Beside them it names the options that are unknown, which typer would name alone.
        """
        params = [param for param in self.get_params(ctx) if param.param_type_name == "option"]
        own = [name for param in params for name in (*param.opts, *param.secondary_opts)]
        pairs = zip(args, [*args, ""][1:], strict=True)
        flags = {
            arg: following
            for arg, following in pairs
            if arg.startswith("--") and arg.partition("=")[0] not in own
        }
        if flags and not ctx.resilient_parsing:  # which a shell that completes asks for
            from megalite.config.names import flag_problem

            problems = {flag: flag_problem(flag, following) for flag, following in flags.items()}
            if any(problems.values()):
                long = [name for name in own if name.startswith("--")]
                unknown = f"is no option; options are {', '.join(long)}"
                raise ConfigError([problems[flag] or f"{flag} {unknown}" for flag in problems])
        return super().parse_args(ctx, args)
