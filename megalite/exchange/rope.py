"""The rotation of positions in both dialects of config.json.

transformers 5 writes `rope_parameters`, with the base inside; 4 writes `rope_theta` and
`rope_scaling`, older files with `type` for `rope_type`. A file may have both, if they agree. A kind
of scaling is a row of `SCALINGS`; no default of ours fills a gap in a file's scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config import ModelConfig
from megalite.exchange.keys import ConfigFile

# Kinds of scaling: their keys -> our settings. All keys must be there.
SCALINGS: Mapping[str, Mapping[str, str]] = {
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_max_position",
    },
}
_THETA = 10_000.0  # every class's, where a file has none
_OUTSIDE = ("rope_theta", "partial_rotary_factor")  # that stand beside the older rope_scaling


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the rotation; of a class with `partial`, the share that is rotated."""

    partial: bool = False

    def read(self, file: ConfigFile) -> dict[str, Any]:
        new, old = self._new(file), self._old(file)
        other = {key: old[key] for key in old if key in new and new[key] != old[key]}
        if other:
            file.refuse(
                "rope_parameters",
                new,
                f"the older keys beside it have {other}; remove those that are wrong",
            )
        entries = {"rope_type": "default", "rope_theta": _THETA, **old, **new}
        share = entries.pop("partial_rotary_factor", 1.0)
        if share != 1.0 and not self.partial:
            file.refuse("partial_rotary_factor", share, "this class rotates whole heads")
        settings = {"rope_theta": entries.pop("rope_theta"), "rope_fraction": share}
        return settings | _scaling(file, entries)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        kind = model.rope_scaling or "default"
        names = SCALINGS.get(kind, {})
        scaling = {"rope_type": kind, **{key: getattr(model, ours) for key, ours in names.items()}}
        share = {"partial_rotary_factor": model.rope_fraction} if self.partial else {}
        both = {"rope_theta": model.rope_theta, **share}
        return {
            "rope_parameters": {**scaling, **both},
            "rope_scaling": scaling if model.rope_scaling else None,
            **both,
        }

    def _new(self, file: ConfigFile) -> dict[str, Any]:
        """The file's `rope_parameters`."""
        found = file.get("rope_parameters")
        if found is None:
            return {}
        if not isinstance(found, dict) or any(isinstance(one, dict) for one in found.values()):
            file.refuse("rope_parameters", found, "megalite has one rotation for all layers")
            return {}
        return _plain(found)

    def _old(self, file: ConfigFile) -> dict[str, Any]:
        """The older keys, under the newer names."""
        found = {key: file.entries[key] for key in _OUTSIDE if file.get(key) is not None}
        scaling = file.get("rope_scaling")
        if scaling is None:
            # Null says that nothing is scaled; a file of the newer dialect leaves it out.
            return found | ({"rope_type": "default"} if "rope_scaling" in file.entries else {})
        if not isinstance(scaling, dict):
            file.refuse("rope_scaling", scaling, "it needs to be a table or null")
            return found
        return found | _plain(scaling)


def _plain(entries: Mapping[str, Any]) -> dict[str, Any]:
    """A table's entries, with `rope_type` for the older `type`, without nulls."""
    found = {key: value for key, value in entries.items() if value is not None and key != "type"}
    return {"rope_type": entries.get("type") or "default", **found}


def _scaling(file: ConfigFile, entries: dict[str, Any]) -> dict[str, Any]:
    """The settings of a scaling, of entries that hold nothing but it."""
    kind = entries.pop("rope_type")
    if kind == "default":
        return {"rope_scaling": None}
    names = SCALINGS.get(kind)
    if names is None:
        file.refuse("rope_type", kind, f"megalite scales rotations by {', '.join(SCALINGS)} only")
        return {}
    problems = [f"lacks {key}" for key in names if key not in entries]
    problems += [f"has {key}, which is unknown" for key in entries if key not in names]
    if problems:
        file.refuse("rope_type", kind, f"the scaling {', '.join(problems)}")
        return {}
    return {"rope_scaling": kind, **{ours: entries[key] for key, ours in names.items()}}
