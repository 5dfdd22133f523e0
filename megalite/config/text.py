"""A config as text: TOML that loads back equal, and a table of values with their origins."""

from __future__ import annotations

from megalite.config.effect import without_effect
from megalite.config.load import LoadedConfig
from megalite.config.names import default_of, keys, section_keys, sections, toml_value, value_of
from megalite.config.schema import RunConfig


def to_toml(config: RunConfig) -> str:
    """Every setting as TOML; None is written "none". Loads back to an equal config.

    Left out are settings that have no effect in this config and have their default, because a file
    that names them is refused.
    """
    left_out = {name for name in without_effect(config) if _is_default(config, name)}
    lines = [_assignment(config, name, name) for name in keys() if "." not in name]
    for section in sections():
        names = [(key, f"{section}.{key}") for key in section_keys(section)]
        lines += ["", f"[{section}]"]
        lines += [_assignment(config, key, name) for key, name in names if name not in left_out]
    return "\n".join(lines) + "\n"


def model_toml(config: RunConfig) -> str:
    """The [model] section as TOML: what its family's defaults do not say."""
    idle = without_effect(config)
    names = [(key, f"model.{key}") for key in section_keys("model")]
    lines = [
        _assignment(config, key, name)
        for key, name in names
        if name == "model.family" or (name not in idle and not _is_default(config, name))
    ]
    return "\n".join(["[model]", *lines]) + "\n"


def format_config(loaded: LoadedConfig) -> str:
    """A table with one line per setting: name, value, origin of the value."""
    rows = {n: toml_value(value_of(loaded.config, n)) for n in keys()}
    wide, widest = max(map(len, rows)), max(map(len, rows.values()))
    return "\n".join(
        f"{name:<{wide}}  {value:<{widest}}  {loaded.origins[name]}" for name, value in rows.items()
    )


def _assignment(config: RunConfig, key: str, name: str) -> str:
    return f"{key} = {toml_value(value_of(config, name))}"


def _is_default(config: RunConfig, name: str) -> bool:
    return bool(value_of(config, name) == default_of(config, name))
