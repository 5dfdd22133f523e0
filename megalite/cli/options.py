"""Arguments that several verbs take: a config, its overrides, paths; and the command they form.

`~` at the start of a path stands for the user's home also where the shell leaves it, as in
`--out=~/data`.
"""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from megalite.errors import ConfigError


def path(text: str) -> str:
    """The path that an argument or option names: the parser of every one."""
    return expanduser(text)


def file(text: str) -> Path:
    """The file that an option names, as a Path."""
    return Path(path(text))


ConfigFile = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="A TOML file, or a name that `megalite configs` lists."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings that replace the file's."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the values as JSON.")]


class SettingsCommand(TyperCommand):
    """A verb that takes settings: those written as options are reported, all at once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`. Raises ConfigError for settings among the options, of any framework."""
        from megalite.config.names import flag_problem

        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        flags = [arg for arg in args if arg.startswith("--") and arg.partition("=")[0] not in own]
        problems = [problem for flag in flags if (problem := flag_problem(flag))]
        if problems:
            raise ConfigError(problems)
        return super().parse_args(ctx, args)
