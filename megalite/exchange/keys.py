"""Entries of a config.json as settings of [model], and back.

A class of theirs is a list of traits. Each reads its keys of a file and gives settings, and writes
those keys for a model. What a trait cannot say, reading its own keys again shows: `settings that
come back different` is the whole test of whether a class can hold a model (classes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megalite.config import ModelConfig

_MISSING = object()


@dataclass
class ConfigFile:
    """The entries of a config.json: which have been read, and what is wrong with them."""

    entries: Mapping[str, Any]
    read: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the class's default where the file leaves it out."""
        self.read.add(key)
        return self.entries.get(key, default)

    def refuse(self, key: str, value: Any, reason: str) -> None:
        """Note an entry that cannot be followed."""
        self.problems.append(f"{key} = {value!r}: {reason}")


class Trait(Protocol):
    """One property of a class of models, between its keys and our settings."""

    def read(self, file: ConfigFile) -> dict[str, Any]:
        """The settings that the file's keys give; problems go to the file."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The keys that say it of a model."""


@dataclass(frozen=True)
class Value:
    """A key that is a setting. `default`: what the class takes where the key is left out."""

    key: str
    setting: str
    default: Any

    def read(self, file: ConfigFile) -> dict[str, Any]:
        return {self.setting: file.get(self.key, self.default)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.key: getattr(model, self.setting)}


@dataclass(frozen=True)
class Always:
    """Settings that a class has whatever its file says."""

    settings: Mapping[str, Any]

    def read(self, file: ConfigFile) -> dict[str, Any]:
        return dict(self.settings)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Only:
    """A key that may have one value alone, as megalite has no trait for others."""

    key: str
    value: Any
    trait: str  # that another value would need

    def read(self, file: ConfigFile) -> dict[str, Any]:
        found = file.get(self.key, self.value)
        if found != self.value:
            file.refuse(self.key, found, f"megalite has no {self.trait}; it takes {self.value!r}")
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.key: self.value}


@dataclass(frozen=True)
class Choice:
    """A key whose values are names: theirs -> our value of a setting; the first is written."""

    key: str
    setting: str
    values: Mapping[str, Any]
    default: str

    def read(self, file: ConfigFile) -> dict[str, Any]:
        found = file.get(self.key, self.default)
        if found not in self.values:
            known = ", ".join(self.values)
            file.refuse(
                self.key, found, f"megalite has no such model.{self.setting}; it has {known}"
            )
            return {}
        return {self.setting: self.values[found]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        ours = getattr(model, self.setting)
        names = [name for name, value in self.values.items() if value == ours]
        return {self.key: names[0]} if names else {}


@dataclass(frozen=True)
class KeyValueHeads:
    """`num_key_value_heads`; null is one for each query head."""

    default: int | None

    def read(self, file: ConfigFile) -> dict[str, Any]:
        return {"num_kv_heads": file.get("num_key_value_heads", self.default)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"num_key_value_heads": model.kv_heads}


@dataclass(frozen=True)
class HeadDim:
    """`head_dim`, explicit first; null is hidden / heads."""

    default: int | None

    def read(self, file: ConfigFile) -> dict[str, Any]:
        return {"head_dim": file.get("head_dim", self.default)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"head_dim": model.head_size}


@dataclass(frozen=True)
class InnerSize:
    """GPT-2's `n_inner`; null is four times the hidden size."""

    def read(self, file: ConfigFile) -> dict[str, Any]:
        inner = file.get("n_inner")
        return {"ffn_hidden_size": 4 * file.get("n_embd", 768) if inner is None else inner}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        is_default = model.ffn_hidden_size == 4 * model.hidden_size
        return {"n_inner": None if is_default else model.ffn_hidden_size}


@dataclass(frozen=True)
class AttentionBias:
    """`attention_bias`: biases of query, key and value, and of the output projection."""

    def read(self, file: ConfigFile) -> dict[str, Any]:
        found = file.get("attention_bias", False)
        return {"qkv_bias": found, "attention_out_bias": found}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": model.qkv_bias}


@dataclass(frozen=True)
class Window:
    """`sliding_window` of every layer (Mistral)."""

    default: int | None

    def read(self, file: ConfigFile) -> dict[str, Any]:
        return {"sliding_window": file.get("sliding_window", self.default)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": model.sliding_window}


@dataclass(frozen=True)
class SwitchedWindow:
    """Qwen's window: only with `use_sliding_window`, and from layer `max_window_layers` on."""

    def read(self, file: ConfigFile) -> dict[str, Any]:
        switched = file.get("use_sliding_window", False)
        window = (
            file.get("sliding_window", 4096) if switched else file.get("sliding_window") and None
        )
        first = file.get("max_window_layers", 28)
        layers = file.get("num_hidden_layers", 32)
        kinds = file.get("layer_types")
        if kinds is None:
            kinds = [
                "sliding_attention" if window is not None and layer >= first else "full_attention"
                for layer in range(layers if isinstance(layers, int) else 0)
            ]
        if set(kinds) == {"full_attention"}:
            return {"sliding_window": None}
        if set(kinds) != {"sliding_attention"}:
            reason = "megalite has no windows in some layers alone"
            file.refuse("layer_types", kinds, f"{reason}; it takes equal layers")
        return {"sliding_window": window}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        window, layers = model.sliding_window, model.num_layers
        kind = "full_attention" if window is None else "sliding_attention"
        first = {} if window is None else {"max_window_layers": 0}
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": [kind] * layers,
            **first,
        }
