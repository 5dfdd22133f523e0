"""`megalite configs`: list the configs that come with megalite, or print one. Thin."""

from __future__ import annotations

from typing import Annotated

import typer

from megalite.cli.completion import completion, shipped_from
from megalite.errors import ConfigError

_USES = {
    "runs": "megalite train NAME",
    "models": 'base = "NAME" in a run of your own',
    "hardware": "megalite plan CONFIG --hardware NAME",
}


def configs(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Print this one, to edit as a file.",
            autocompletion=completion(shipped_from),
        ),
    ] = None,
) -> None:
    """List the configs that come with megalite, or print one."""
    from megalite.config.shipped import near_names, shipped_configs

    found = shipped_configs()
    if name is not None:
        if name not in found:
            near = near_names(name)
            hint = f"did you mean {' or '.join(near)}?" if near else "`megalite configs` lists them"
            raise ConfigError(f"no config of the name {name} comes with megalite; {hint}")
        typer.echo(found[name].path.read_text(encoding="utf-8"), nl=False)
        return

    width = max(map(len, found))
    for kind, use in _USES.items():
        typer.echo(f"{kind} ({use})")
        for one in found.values():
            if one.kind == kind:
                typer.echo(f"  {one.name:<{width}}  {one.summary}")
