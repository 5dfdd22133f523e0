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
    """A key that is a setting. `default`: what the class takes where the key is left out.

    written: the property of the model to write, for a setting that may stay open.
    """

    key: str
    setting: str
    default: Any
    written: str = ""

    def read(self, file: ConfigFile) -> dict[str, Any]:
        return {self.setting: file.get(self.key, self.default)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.key: getattr(model, self.written or self.setting)}


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

    default: bool = False

    def read(self, file: ConfigFile) -> dict[str, Any]:
        found = file.get("attention_bias", self.default)
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


_WINDOWED = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True)
class Layers:
    """The kinds of layers: `layer_types`, `sliding_window`, and `no_rope_layers` of SmolLM3.

    number: of layers, and window: the class's defaults. period: every such layer has full attention
    where `layer_types` is left out; 0: all have. switch: `use_sliding_window` and
    `max_window_layers` (Qwen) decide instead. nope: one layer in `nope` has no rotation where
    `no_rope_layers` is left out; 0: the class has no such key.
    """

    number: int
    window: int | None
    period: int = 0
    switch: bool = False
    nope: int = 0

    def read(self, file: ConfigFile) -> dict[str, Any]:
        given = file.get("num_hidden_layers", self.number)
        layers = range(given if isinstance(given, int) else 0)
        window = file.get("sliding_window", self.window)
        first = file.get("max_window_layers", 28) if self.switch else 0
        if self.switch and not file.get("use_sliding_window", False):
            window = None
        kinds = file.get("layer_types") or self._default(file, window, layers, first)
        unknown = sorted({kind for kind in kinds if kind not in _WINDOWED})
        if unknown:
            known = ", ".join(_WINDOWED)
            file.refuse("layer_types", unknown, f"megalite has no such layers; it has {known}")
            return {}
        rotated = [True] * len(kinds)
        if self.nope:
            interval = file.get("no_rope_layer_interval", self.nope)
            rotated = file.get("no_rope_layers") or [(i + 1) % interval != 0 for i in layers]
        names = [
            ("window" if _WINDOWED[kind] and window is not None else "full")
            + ("" if rotates else "_nope")
            for kind, rotates in zip(kinds, rotated, strict=False)
        ]
        has_window = any("window" in name for name in names)
        return {
            "sliding_window": window if has_window else None,
            "layers": None if set(names) <= {"window"} or set(names) == {"full"} else names,
        }

    def write(self, model: ModelConfig) -> dict[str, Any]:
        kinds, window = model.kinds, model.sliding_window
        types = ["full_attention" if k.window is None else "sliding_attention" for k in kinds]
        keys: dict[str, Any] = {"sliding_window": window, "layer_types": types}
        if self.switch:
            keys["use_sliding_window"] = window is not None
            if "sliding_attention" in types:
                keys["max_window_layers"] = types.index("sliding_attention")
        if self.nope:
            keys["no_rope_layers"] = [int(kind.rotation != "none") for kind in kinds]
            keys["no_rope_layer_interval"] = self.nope
        return keys

    def _default(
        self, file: ConfigFile, window: int | None, layers: range, first: int
    ) -> list[str]:
        """`layer_types` where a file leaves it out."""
        if self.switch:
            windowed = [window is not None and layer >= first for layer in layers]
        else:
            period = file.get("sliding_window_pattern", self.period) if self.period else 1
            windowed = [(layer + 1) % period != 0 for layer in layers]
        return ["sliding_attention" if each else "full_attention" for each in windowed]


@dataclass(frozen=True)
class QueryScalar:
    """Gemma's `query_pre_attn_scalar`: scores are divided by its root."""

    default: int

    def read(self, file: ConfigFile) -> dict[str, Any]:
        return {"attention_multiplier": file.get("query_pre_attn_scalar", self.default) ** -0.5}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"query_pre_attn_scalar": round(model.attention_factor**-2)}


@dataclass(frozen=True)
class NeoXDropout:
    """`hidden_dropout`: of the embedding's output, and before each residual sum."""

    def read(self, file: ConfigFile) -> dict[str, Any]:
        found = file.get("hidden_dropout", 0.0)
        return {"embedding_dropout": found, "residual_dropout": found}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"hidden_dropout": model.residual_dropout}
