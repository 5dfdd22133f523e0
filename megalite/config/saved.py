"""The settings that a checkpoint was saved with, read by every version since.

One function for all who need them: resuming, starting from weights, generating, describing.
Settings that the checkpoint does not have yet are defaults; those that have another name now, or
none, are in two tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from megalite.config.names import keys, nested, toml_value
from megalite.config.schema import RunConfig
from megalite.errors import CheckpointError

# Former names of settings, each with the settings that have its value now, and settings that are
# gone with the value that means what happens now.
RENAMED: Mapping[str, tuple[str, ...]] = {
    "model.linear_bias": ("model.attention_out_bias", "model.mlp_bias"),
}
REMOVED: Mapping[str, Any] = {}


def saved_config(tree: Any, where: str) -> RunConfig:
    """The config in the manifest of the checkpoint `where`.

    Raises CheckpointError, with every setting that this version cannot read and its value.
    """
    problems: list[str] = []
    values: dict[str, Any] = {}
    for saved, value in _flat("", tree if isinstance(tree, dict) else {}):
        names = [name for name in RENAMED.get(saved, (saved,)) if name in keys()]
        values |= dict.fromkeys(names, value)
        if not names and (saved not in REMOVED or REMOVED[saved] != value):
            problems.append(f"{saved}={toml_value(value)}: this version has no such setting")
    try:
        # Not strict: JSON has lists where a setting is a tuple.
        config = RunConfig.model_validate(nested(values), strict=False)
    except ValidationError as error:
        problems += [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    if problems:
        raise CheckpointError(
            f"{where} was saved with settings that this version cannot read; use the version that "
            "saved it, which its manifest names\n" + "\n".join(problems)
        )
    return config


def _flat(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted names and values; an unknown section is given by its settings."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in keys():
            yield from _flat(f"{name}.", value)
        else:
            yield name, value
