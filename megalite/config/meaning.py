"""The meaning of settings that can be written in several ways, to compare two configs.

A setting that was left open and its value written out mean the same, and so do shares in other
units: a run that is resumed may change between them. Where two configs mean the same by two
different settings (steps and tokens), train/changes.py compares. Pure; builds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megalite.config.effect import effective_window, without_effect
from megalite.config.inputs import sources
from megalite.config.names import keys, value_of
from megalite.config.schema import RunConfig
from megalite.config.shares import SPLIT_NAMES, blend_parts, decimal_fraction


def same_meaning(old: RunConfig, new: RunConfig, name: str) -> bool:
    """True if a setting means the same in two configs, or has no effect in both."""
    if value_of(old, name) == value_of(new, name):
        return True
    meaning = _MEANINGS.get(name)
    if meaning is not None and meaning(old) == meaning(new):
        return True
    return name in without_effect(old) and name in without_effect(new)


def function_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of [model] that decide what it computes, by dotted name.

    Left out are those that only training uses, and those that have no effect in this model.
    """
    idle = {*without_effect(config), *_NO_FUNCTION}
    names = [name for name in keys() if name.startswith("model.") and name not in idle]
    found = {name: value_of(config, name) for name in names}
    model = config.model
    # The numbers that open settings stand for. A base of their own is one of the windowed layers
    # only where it, or its lack of scaling, tells them from the others.
    local = model.rope_local_theta
    if local == model.rope_theta and model.rope_scaling is None:
        local = None
    return found | {
        "model.num_kv_heads": model.kv_heads,
        "model.head_dim": model.head_size,
        "model.embedding_multiplier": model.embedding_factor,
        "model.attention_multiplier": model.attention_factor,
        "model.layers": model.layer_names,
        "model.rope_local_theta": local if "model.rope_local_theta" in found else None,
    }


# A family only gives defaults; padding rows are no tokens; the others are drawn in training.
_NO_FUNCTION = (
    "model.family",
    "model.vocab_pad_multiple",
    "model.embedding_dropout",
    "model.attention_dropout",
    "model.residual_dropout",
    "model.init_std",
)


def _ramp_tokens(config: RunConfig) -> int | None:
    """The length of the batch ramp in tokens."""
    samples, tokens = config.train.batch_ramp_samples, config.train.batch_ramp_tokens
    return tokens if samples is None else samples * config.data.seq_length


def _sources(config: RunConfig) -> list[tuple[Any, ...]]:
    """Names and parts of the blend: paths may move, and weights are relative."""
    found = sources(config.data)
    parts = blend_parts([source.weight for source in found])
    return [(source.name, part) for source, part in zip(found, parts, strict=True)]


def _split(config: RunConfig) -> list[Any]:
    """Shares of all parts; one that is left out is 0."""
    shares = [decimal_fraction(share) for share in config.data.split]
    shares += [decimal_fraction(0.0)] * (len(SPLIT_NAMES) - len(shares))
    return [share / sum(shares) for share in shares]


def _groups(config: RunConfig) -> list[dict[str, Any]]:
    """The groups, without scales of 1 that no group before them makes different from none."""
    entries: list[dict[str, Any]] = []
    scaled = False
    for group in config.optimizer.groups:
        scaled = scaled or group.lr_scale not in (None, 1.0)
        entries.append(group.model_dump() | ({} if scaled else {"lr_scale": None}))
    return entries


_MEANINGS: dict[str, Callable[[RunConfig], Any]] = {
    "model.num_kv_heads": lambda config: config.model.kv_heads,
    "model.head_dim": lambda config: config.model.head_size,
    "model.vocab_pad_multiple": lambda config: config.model.padded_vocab_size,
    "model.sliding_window": effective_window,
    "model.layers": lambda config: config.model.layer_names,
    "optimizer.groups": _groups,
    "data.sources": _sources,
    "data.split": _split,
    "train.batch_ramp_samples": _ramp_tokens,
    "train.batch_ramp_tokens": _ramp_tokens,
}
