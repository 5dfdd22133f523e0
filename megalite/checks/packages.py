"""Optional packages that a config asks for: what is missing, and how to install it.

Looks for packages without importing them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

from megalite.config import RunConfig
from megalite.errors import ConfigError

Found = Callable[[str], bool]

# package -> the extra that installs it
_EXTRAS = {"matplotlib": "plots", "pyarrow": "corpora"} | {
    name: name for name in ("tensorboard", "tokenizers", "triton", "wandb")
}


def is_installed(package: str) -> bool:
    """True if a package can be imported; a bare folder of that name (./wandb) does not count."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def install_command(package: str) -> str:
    """The command that installs an optional package, by its extra."""
    return f"pip install 'megalite[{_EXTRAS[package]}]'"


def missing_package(package: str) -> str | None:
    """A line for an optional package that is not installed, with the remedy; None if it is."""
    if is_installed(package):
        return None
    return f"needs {package}, which is not installed: {install_command(package)}"


def missing_extras(config: RunConfig, found: Found | None = None) -> list[str]:
    """One line for each optional package that the config needs and that is not installed."""
    return [
        f"{setting} needs the package {package}, which is not installed; install it with "
        f"`{install_command(package)}`, or remove the setting"
        for setting, package in _wanted(config)
        if not (found or is_installed)(package)
    ]


def require_extras(config: RunConfig) -> None:
    """Raise ConfigError for every missing optional package that the config needs."""
    problems = missing_extras(config)
    if problems:
        raise ConfigError(problems)


def _wanted(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.log.tensorboard:
        yield "log.tensorboard=true", "tensorboard"
    if config.log.wandb.project is not None:
        yield f"log.wandb.project={config.log.wandb.project}", "wandb"
