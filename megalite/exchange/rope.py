"""The rotation of positions in both dialects of config.json.

transformers 5 writes `rope_parameters`, with the base inside; 4 writes `rope_theta` and
`rope_scaling`, older files with `type` for `rope_type`. A file may have both, if they agree. A kind
of scaling is a row of `SCALINGS`; no default of ours fills a gap in a file's scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    "linear": {"factor": "rope_factor"},
    "yarn": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original_max_position",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "truncate": "rope_truncate",
        "attention_factor": "rope_attention_factor",
    },
}
# Keys of a scaling that a file may leave out, with what the classes take then.
_OPTIONAL: Mapping[str, Mapping[str, Any]] = {
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None},
}
_THETA = 10_000.0  # every class's, where a file has none
_OUTSIDE = ("rope_theta", "partial_rotary_factor")  # that stand beside the older rope_scaling


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the rotation; of a class with `partial`, the share that is rotated.

    theta and share: what the class takes where a file has none. scales: kinds of scaling that the
    class has. older: its own names of the older keys.
    """

    partial: bool = False
    theta: float = _THETA
    share: float = 1.0
    scales: tuple[str, ...] = tuple(SCALINGS)
    older: Mapping[str, str] = field(default_factory=dict)

    def read(self, file: ConfigFile) -> dict[str, Any]:
        new, old = self._new(file), self._old(file)
        other = {key: old[key] for key in old if key in new and new[key] != old[key]}
        if other:
            file.refuse(
                "rope_parameters",
                new,
                f"the older keys beside it have {other}; remove those that are wrong",
            )
        entries = {"rope_type": "default", "rope_theta": self.theta, **old, **new}
        share = entries.pop("partial_rotary_factor", self.share)
        if share != 1.0 and not self.partial:
            file.refuse("partial_rotary_factor", share, "this class rotates whole heads")
        settings = {"rope_theta": entries.pop("rope_theta"), "rope_fraction": share}
        return settings | _scaling(file, entries, self.scales)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        kind = model.rope_scaling or "default"
        names = SCALINGS.get(kind, {})
        scaling = {"rope_type": kind}
        for key, ours in names.items():
            value, optional = getattr(model, ours), _OPTIONAL.get(kind, {})
            scaling |= {} if key in optional and value == optional[key] else {key: value}
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
        for key, name in self.older.items():
            if file.get(key) is not None:
                found[name] = file.entries[key]
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


@dataclass(frozen=True)
class LayerRope:
    """A rotation of full layers and one of layers with a window, which nothing scales.

    local: the base of the latter where a file has none; None: that of the others. `local_key` is
    its older name.
    """

    theta: float
    local: float | None = None
    local_key: str = ""

    def read(self, file: ConfigFile) -> dict[str, Any]:
        nested = file.get("rope_parameters")
        full, local, inner = None, {}, file
        if isinstance(nested, dict) and "full_attention" in nested:
            full, local = nested["full_attention"], _plain(nested.get("sliding_attention") or {})
            inner = ConfigFile({"rope_parameters": full})
        settings = Rope(theta=self.theta).read(inner)
        if inner is not file:
            file.problems += inner.problems
            file.read |= {"rope_theta", "rope_scaling", self.local_key}
        if full is not None and local == _plain(full):
            return settings | {"rope_local_theta": None}
        if local.get("rope_type", "default") != "default":
            file.refuse("rope_parameters", local, "megalite scales full layers' rotation only")
        older = file.get(self.local_key) if self.local_key else None
        base = local.get("rope_theta", older) or self.local or settings["rope_theta"]
        same = base == settings["rope_theta"] and settings.get("rope_scaling") is None
        return settings | {"rope_local_theta": None if same else base}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        keys = Rope().write(model)
        full = keys["rope_parameters"]
        local = {"rope_type": "default", "rope_theta": model.rope_local_theta}
        windowed = full if model.rope_local_theta is None else local
        older = {} if not self.local_key else {self.local_key: windowed["rope_theta"]}
        both = {"full_attention": full, "sliding_attention": windowed}
        return {"rope_parameters": both, "rope_theta": model.rope_theta, **older}


def _scaling(file: ConfigFile, entries: dict[str, Any], scales: tuple[str, ...]) -> dict[str, Any]:
    """The settings of a scaling, of entries that hold nothing but it."""
    kind = entries.pop("rope_type")
    if kind == "default":
        return {"rope_scaling": None}
    names = SCALINGS.get(kind)
    if names is None or kind not in scales:
        allowed = ", ".join(scales) or "nothing"
        file.refuse("rope_type", kind, f"megalite scales this class's rotation by {allowed} only")
        return {}
    entries = {**_OPTIONAL.get(kind, {}), **entries}
    if kind == "yarn":
        entries = _with_mscale(entries)
    problems = [f"lacks {key}" for key in names if key not in entries]
    problems += [f"has {key}, which is unknown" for key in entries if key not in names]
    if problems:
        file.refuse("rope_type", kind, f"the scaling {', '.join(problems)}")
        return {}
    return {"rope_scaling": kind, **{ours: entries[key] for key, ours in names.items()}}


def _with_mscale(entries: dict[str, Any]) -> dict[str, Any]:
    """YaRN's entries with `attention_factor` for the two scales that may stand for it."""
    scales = [entries.pop(key, None) for key in ("mscale", "mscale_all_dim")]
    if entries["attention_factor"] is None and all(scales):
        over, under = (0.1 * scale * math.log(entries["factor"]) + 1 for scale in scales)
        entries["attention_factor"] = over / under
    return entries
