"""The configs that come with megalite: runs, models to base runs on, and hardware, each by a name.

They are configs/ of a checkout, and lie inside the package where it is installed. A run's name is
that of its file without `.toml`; that of a model or a device has its folder before it:
`quickstart`, `models/llama-8b`, `hardware/h100`. Lists them; load.py reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from os.path import expanduser
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["runs", "models", "hardware"]


@dataclass(frozen=True)
class ShippedConfig:
    """One config that comes with megalite."""

    name: str
    kind: Kind
    path: Path

    @property
    def summary(self) -> str:
        """The comment in the file's first line."""
        with self.path.open(encoding="utf-8") as file:
            return file.readline().removeprefix("#").strip()


@cache
def shipped_configs() -> dict[str, ShippedConfig]:
    """Name -> config, kind by kind."""
    return {one.name: one for one in _found()}


def find_config(text: str | Path, folder: Path) -> Path:
    """The file that a config's path means, seen from `folder`, or a shipped config by its name.

    A file that exists is never a name; a text that is neither comes back as a path.
    """
    path = folder / expanduser(text)
    shipped = shipped_configs().get(str(text))
    if shipped is None or (os.path.lexists(path) and not path.is_dir()):
        return path
    return shipped.path


def near_names(text: str | Path) -> list[str]:
    """Names of up to three shipped configs that a wrong name or path may mean, the nearest first.

    Only the last part of each counts: a file may be sought in a folder that is not here.
    """
    last = {name.rpartition("/")[2]: name for name in shipped_configs()}
    wanted = str(text).rpartition("/")[2].removesuffix(".toml")
    return [last[match] for match in get_close_matches(wanted, last, n=3)]


def _found() -> Iterator[ShippedConfig]:
    root = _root()
    for kind in get_args(Kind):
        files = sorted((root / kind).glob("*.toml"))
        if kind == "runs":
            files = [*sorted(root.glob("*.toml")), *files]  # the first run lies at the top
        for path in files:
            name = path.stem if kind == "runs" else f"{kind}/{path.stem}"
            yield ShippedConfig(name, kind, path)


def _root() -> Path:
    """The folder inside an installed package, else that of the source tree."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
