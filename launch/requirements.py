"""The packages that an image needs beside its torch, read from pyproject.toml for the Dockerfile.

requirements.py pins                      print pins of torch and its relatives in the base image
requirements.py needed [--extra A,B]      print the dependencies without torch and triton
requirements.py check --needs-torch 0|1   fail if torch is too old, or missing but needed
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

# Packages that a base image builds to fit each other: replacing one of them breaks the others.
_KEPT = re.compile(r"(pytorch[_-])?(torch|triton|apex|nvidia|transformer[_-]engine|flash[_-]attn)")

_PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def pins() -> list[str]:
    """`name==version` of every installed package that must not be replaced."""
    found = {str(d.metadata["Name"]): d.version for d in distributions() if d.metadata["Name"]}
    return sorted(f"{name}=={at}" for name, at in found.items() if _KEPT.match(name.lower()))


def needed(extras: list[str]) -> list[str]:
    """Requirements of megalite and some of its extras, without the packages of the base image."""
    project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"]]
    for extra in extras:
        asked += project["optional-dependencies"][extra]
    return [requirement for requirement in asked if not _KEPT.match(requirement)]


def check(needs_torch: bool) -> str | None:
    """The reason why this Python's torch cannot be used; None if it can."""
    project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"]
    wanted = next(r for r in project["dependencies"] if r.startswith("torch>="))
    try:
        found = version("torch")
    except PackageNotFoundError:
        return f"the base image has no torch; {wanted} is needed" if needs_torch else None
    if _numbers(found) < _numbers(wanted):
        return f"the base image has torch {found}; {wanted} is needed"
    return None


def _numbers(text: str) -> tuple[int, int]:
    """Major and minor version in a version or a requirement."""
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)


def main(verb: str, *arguments: str) -> str | None:
    """Run one verb; returns an error or None."""
    value = arguments[1] if len(arguments) > 1 else ""
    if verb == "check":
        return check(value == "1")
    lines = pins() if verb == "pins" else needed(value.split(",") if value else [])
    print("\n".join(lines))
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
