"""The names a config may use: every dotted key, its type and default, the nearest to a typo.

Also the text form of values, for files and messages (`toml_value`). Derived from the models
in config/schema.py, so there is no second list to keep. Reads no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from megalite.config.families import family_defaults
from megalite.config.frameworks import ForeignWord, find_foreign
from megalite.config.schema import RunConfig, Section

NEAR_ENOUGH = 0.6  # of difflib's ratio; below it a suggestion would be a guess


@dataclass(frozen=True)
class Key:
    """One setting: its dotted name, the values it takes, and its default.

    `default` is None for a required key, too; `required` distinguishes the two.
    """

    name: str  # dotted, e.g. "optimizer.lr"; top-level keys have no dot
    kinds: frozenset[
        type
    ]  # plain types of its values: int, float, bool, str, list, tuple, NoneType
    choices: tuple[Any, ...]  # the only values that it takes, if they are few
    required: bool
    default: Any

    @property
    def optional(self) -> bool:
        """True if it may be None."""
        return NoneType in self.kinds

    @property
    def is_string(self) -> bool:
        """True if it takes strings only, apart from None."""
        return self.kinds - {NoneType} == {str}


@cache
def sections() -> dict[str, type[Section]]:
    """Section name -> its model, in the order of RunConfig; one inside another has a dot."""
    return dict(_sections_of(RunConfig, ""))


@cache
def keys() -> dict[str, Key]:
    """Dotted name -> Key, for every setting, in the order of the models."""
    return {key.name: key for key in _walk()}


def section_keys(section: str) -> list[str]:
    """The bare key names of one section."""
    fields = sections()[section].model_fields
    return [key for key in fields if f"{section}.{key}" not in sections()]


def value_of(config: RunConfig, name: str) -> Any:
    """The value of a dotted key in a config."""
    node: Any = config
    for part in name.split("."):
        node = getattr(node, part)
    return node


def default_of(config: RunConfig, name: str) -> Any:
    """The default of a dotted key in a config; for some keys it depends on the model's family."""
    section, _, leaf = name.rpartition(".")
    default = keys()[name].default
    if section != "model":
        return default
    return family_defaults(config.model.family).get(leaf, default)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as a tree of sections.

    Each section is present even if empty, so that a required key that is missing is named itself.
    """
    tree: dict[str, Any] = {}
    for name, value in [*((section, {}) for section in sections()), *values.items()]:
        *parents, key = name.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[key] = value
    return tree


def toml_value(value: Any) -> str:
    """A value in TOML syntax; None as "none", which load_config reads as unset.

    Inside a table (an entry of optimizer.groups) keys that are None are left out.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml_value(item)}' for key, item in value.items())}}}"
    return repr(value) if isinstance(value, float) else str(value)


def suggestion(name: str, value: Any = True) -> tuple[list[str], str]:
    """The keys that an unknown dotted name most likely means, and the advice in words.

    A word of another framework is translated (config/frameworks.py), or is to be removed where its
    value switches off what is not here; any other is compared with all keys by its spelling.
    """
    if foreign := _foreign(name):
        return ([] if foreign.setting is None else [foreign.setting]), foreign.advice(value)
    near = nearest(name)
    section = name.rpartition(".")[0]
    if near:
        return near, f"did you mean {' or '.join(near)}?"
    if section in sections():
        return [], f"[{section}] has {', '.join(section_keys(section))}"
    return [], f"sections are {', '.join(sections())}"


def flag_problem(flag: str, following: str = "") -> str | None:
    """The message about a setting, of this or another framework, written as --flag; else None.

    following: the next word of the command line, which may be the value of a flag without "=".
    """
    name, has_value, value = flag.lstrip("-").partition("=")
    if foreign := _foreign(name):
        given = value if has_value else following or True  # a lone flag switches on
        form = "" if foreign.is_off(given) else "; settings are written section.key=VALUE"
        return f"--{name} is no option; {foreign.advice(given)}{form}"
    if same := _same_spelling(name) or _joined(name):
        written = [f"{key}={'VALUE' if has_value else _value_of_flag(key)}" for key in same]
        return f"--{name} is no option; write {' or '.join(written)}"
    return None


def nearest(name: str) -> list[str]:
    """The keys that a misspelt dotted name most likely means, best first; empty if none is close.

    First the same key with hyphens or in other case, then the same key in other sections, then with
    other marks between section and key, then the most similar spelling, where its own section comes
    before others.
    """
    section, _, leaf = _normal(name).rpartition(".")
    scored = [(_likeness(section, leaf, key), key) for key in keys()]
    best = max(score for score, _ in scored)
    same = _same_spelling(name) or _joined(name)
    return same or [key for score, key in scored if score == best >= NEAR_ENOUGH]


def nearest_section(name: str) -> str | None:
    """The section that a misspelt section name most likely means, or None."""
    scored = [(_ratio(_normal(name), section), section) for section in sections()]
    score, best = max(scored)
    return best if score >= NEAR_ENOUGH else None


def _walk() -> Iterator[Key]:
    for name in RunConfig.model_fields:
        if name not in sections():
            yield _key(RunConfig, "", name)
    for section, model in sections().items():
        for name in section_keys(section):
            yield _key(model, f"{section}.", name)


def _sections_of(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield prefix + name, kind
            yield from _sections_of(kind, f"{prefix}{name}.")


def _key(model: type[BaseModel], prefix: str, name: str) -> Key:
    info = model.model_fields[name]
    required = info.is_required()
    kinds = frozenset(_kinds(info.annotation))
    choices = (False, True) if kinds == {bool} else ()
    parts = [part for part in _members(info.annotation) if part is not NoneType]
    if len(parts) == 1 and get_origin(parts[0]) is Literal:
        choices = get_args(parts[0])
    return Key(prefix + name, kinds, choices, required, None if required else info.default)


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else itself."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _kinds(annotation: Any) -> Iterator[type]:
    """The plain types an annotation accepts: members of a union, types of a Literal's values."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from map(type, parts)
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _kinds(part)
    elif origin is Annotated:
        yield from _kinds(parts[0])
    else:
        yield origin or annotation


def _value_of_flag(name: str) -> str:
    """The value that an option without one stands for: true where the setting is a switch."""
    return "true" if keys()[name].kinds == {bool} else "VALUE"


def _same_spelling(name: str) -> list[str]:
    """Keys that differ from a name in hyphens and case only, or, if none, in the section too."""
    wanted = _squash(_normal(name))
    leaf = wanted.rpartition(".")[2]
    exact = [key for key in keys() if _squash(key) == wanted]
    return exact or [key for key in keys() if _squash(key.rpartition(".")[2]) == leaf]


def _joined(name: str) -> list[str]:
    """The key that a name is whole, with other marks for its dots: eval_interval."""
    wanted = _squash(_normal(name)).replace(".", "")
    return [key for key in keys() if _squash(key).replace(".", "") == wanted]


def _foreign(name: str) -> ForeignWord | None:
    """A word of another framework; None also where the name, as no other's, is a key of here."""
    foreign = find_foreign(name)
    if foreign is not None and ("." in foreign.word or not _same_spelling(name)):
        return foreign
    return None


def _normal(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _squash(name: str) -> str:
    return name.replace("_", "")


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()


def _likeness(section: str, leaf: str, key: str) -> float:
    """Likeness of a misspelt name to a key, up to 1: by spelling, or by words they share.

    A key of another section counts less.
    """
    key_section, _, key_leaf = key.rpartition(".")
    words, key_words = set(leaf.split("_")), set(key_leaf.split("_"))
    shared = len(words & key_words) / min(len(words), len(key_words))
    return max(_ratio(leaf, key_leaf), 0.8 * shared) - 0.2 * (1 - _ratio(section, key_section))
