"""From TOML files and `section.key=value` overrides to a RunConfig, with the origin of each value.

Precedence: defaults, a base's base, the base, the file, overrides. Everything wrong with the input
is reported at once; checks.settings checks that the settings fit each other.

TOML has no null: in a file and in an override alike, "none" (or "null") unsets a setting that may
be unset, such as optimizer.clip_grad or data.path. A whole number in exponent form (1e10) is an
integer. Overrides may have Python's spellings, too: .5, True, None, (1, 2).
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from os.path import lexists, normpath, realpath
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalite.config.explain import explain, split_location
from megalite.config.frameworks import find_foreign
from megalite.config.names import (
    Key,
    default_of,
    flag_problem,
    keys,
    nearest_section,
    nested,
    section_keys,
    sections,
    suggestion,
    toml_value,
    value_of,
)
from megalite.config.schema import RunConfig
from megalite.config.shipped import find_config, near_names
from megalite.errors import ConfigError
from megalite.wording import number_of

UNSET = ("none", "null")
_NUMBERS = (1, 64)  # that every required setting takes, to stand in for a wrong one
_LARGEST_EXPONENT = 18  # of numbers that are taken for integers
_MOST_BITS = 64  # of a whole number; more would not fit a float, nor Python's limit of digits

# Origins of values; the others are file names.
DEFAULT, OVERRIDE, DERIVED = "default", "override", "derived"

_BARE_POINT = re.compile(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?")  # .5 or 1.
_ENTRY = re.compile(r"(?P<key>[\w.]+)\[(?P<number>\d{1,6})\]\.(?P<leaf>\w+)")  # list[0].key


@dataclass(frozen=True)
class LoadedConfig:
    """A config with the origin of each value, by dotted key.

    An origin is "default", "base FILE", "FILE", "override", or "derived" for values that were
    filled in later (`with_config`).
    """

    config: RunConfig
    origins: dict[str, str]

    def with_config(self, config: RunConfig) -> LoadedConfig:
        """Another config with these origins, but "derived" for values that differ."""
        old = self.config
        changed = {n: DERIVED for n in keys() if value_of(old, n) != value_of(config, n)}
        return LoadedConfig(config, self.origins | changed)


class InvalidSettings(ConfigError):
    """Settings that cannot be read. What else is wrong can be found with `stand_ins`.

    They are configs that differ in the settings that are `wrong`, by dotted key: a problem that all
    of them have, and that names none of these, is one of the other settings.
    """

    def __init__(
        self, problems: list[str], wrong: frozenset[str], stand_ins: tuple[LoadedConfig, ...]
    ) -> None:
        super().__init__(problems)
        self.wrong, self.stand_ins = wrong, stand_ins


@dataclass
class _Draft:
    """Values read so far, by dotted key: each source overwrites the ones before it."""

    values: dict[str, Any]
    origins: dict[str, str]
    problems: list[str]
    meant: set[str]  # keys that an unknown key was probably meant to be

    def set_value(self, name: str, value: Any, origin: str) -> None:
        """Set a known key."""
        if isinstance(value, (datetime.date, datetime.time)):
            self._refuse(name, f"{name}={value} ({origin}): no setting is a date; quote a text")
            return
        if (bits := _most_bits(value)) > _MOST_BITS:
            self._refuse(
                name,
                f"{name} ({origin}) has a whole number of {bits} bits; use at most {_MOST_BITS}, "
                f"that is {2**_MOST_BITS - 1}",
            )
            return
        # Words that make one dataset are not for another one that a later source names.
        if name == "data.path" and self.origins.get("data.prepare", origin) != origin:
            del self.values["data.prepare"], self.origins["data.prepare"]
        unset = keys()[name].optional and isinstance(value, str) and value.lower() in UNSET
        self.values[name] = None if unset else value
        self.origins[name] = origin

    def _refuse(self, name: str, problem: str) -> None:
        """Record a value that is none of any key; the key counts as given."""
        self.problems.append(problem)
        self.meant.add(name)

    def add_unknown(self, name: str, origin: str, value: Any) -> None:
        """Record an unknown key as a problem, with the keys that it may have been meant to be."""
        meant, advice = suggestion(name, value)
        self.meant.update(meant)
        self.problems.append(f"unknown key {name} ({origin}); {advice}")


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> LoadedConfig:
    """Read a TOML config, its base and the overrides; `path` may name a shipped config.

    Raises ConfigError: for a file that cannot be read, or InvalidSettings with every problem.
    """
    draft = _Draft({}, {}, [], set())
    for origin, tree in _sources(path):
        _add_file(draft, origin, tree)
    _add_overrides(draft, overrides)
    return _finish(draft)


def read_toml(path: Path, what: str = "config") -> dict[str, Any]:
    """Parse a TOML file; `what` names its kind in errors.

    Raises ConfigError if it cannot be read, is no UTF-8 text, or has a syntax error, with the line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); TOML is UTF-8") from None
    except ValueError as error:  # a zero byte, which a base may have
        raise ConfigError(f"cannot read {what} {path}: {error} in its name") from None
    try:
        return tomllib.loads(text, parse_float=_number)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_line(path, text, str(error))) from None
    except RecursionError:
        raise ConfigError(f"{path}: lists or tables are nested too deeply to be read") from None
    except ValueError:  # of Python, which limits the digits
        raise ConfigError(
            f"{path}: a whole number has too many digits; use at most {2**_MOST_BITS - 1}"
        ) from None


def _most_bits(value: Any) -> int:
    """The most bits of a whole number in a value, also within lists and tables."""
    if isinstance(value, dict):
        return _most_bits(list(value.values()))
    if isinstance(value, list):
        return max(map(_most_bits, value), default=0)
    return value.bit_length() if isinstance(value, int) else 0


def _number(text: str) -> int | float:
    """A TOML float; an integer if it is a whole number in exponent form."""
    try:
        number = Decimal(text.replace("_", ""))
    except InvalidOperation:  # an exponent of more than 18 digits
        return float(text)
    if "e" in text.lower() and number.adjusted() <= _LARGEST_EXPONENT and number % 1 == 0:
        return int(number)
    return float(number)


def _sources(named: str | Path) -> list[tuple[str, dict[str, Any]]]:
    """(origin, parsed tree) of a config and of its bases, the last base first.

    Raises ConfigError if one cannot be read, or if the bases form a circle.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    chain: list[Path] = []  # the files read, each named by the one before it
    following: str | Path | None = named
    while following is not None:
        try:
            file, tree = _read_config(following, chain[-1].parent if chain else Path())
        except ConfigError as error:
            names_it = f" (the base that {chain[-1]} names)" if chain else ""
            raise ConfigError(f"{error}{names_it}") from None
        if realpath(file) in map(realpath, chain):
            circle = " -> ".join(normpath(one) for one in [*chain, file])
            raise ConfigError(f"{chain[0]}: its bases form a circle, {circle}; remove one of them")
        following = tree.pop("base", None)
        if following is not None and not isinstance(following, str):
            raise ConfigError(
                f"{file}: base={toml_value(following)} needs to be a file name in quotes"
            )
        found.append((f"base {normpath(file)}" if chain else str(file), tree))
        chain.append(file)
    return found[::-1]


def _read_config(named: str | Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The path of a config and its parsed tree; `named` is seen from `folder` (`find_config`)."""
    path = find_config(named, folder)
    try:
        return path, read_toml(path)
    except ConfigError as error:
        if lexists(path):
            raise
        near = near_names(named)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        lists = "`megalite configs` lists those that come with megalite"
        raise ConfigError(f"{error}; {meant}{lists}") from None


def _add_file(draft: _Draft, origin: str, tree: dict[str, Any]) -> None:
    for name, value in tree.items():
        if isinstance(value, dict) and name not in keys():
            _add_section(draft, origin, name, value)
        else:
            _add_value(draft, origin, name, value)


def _add_value(draft: _Draft, origin: str, name: str, value: Any) -> None:
    if name in sections():
        draft.problems.append(
            f"{name}={toml_value(value)} ({origin}): {name} is a section; "
            f"write [{name}] and its keys below it"
        )
    elif name not in keys():
        draft.add_unknown(name, origin, value)
    else:
        draft.set_value(name, value, origin)


def _add_section(draft: _Draft, origin: str, section: str, table: dict[str, Any]) -> None:
    if section not in sections():
        whole = find_foreign(section)
        if whole is not None and whole.is_off(table):
            draft.problems.append(f"unknown section [{section}] ({origin}); {whole.advice(table)}")
            return
        if any(find_foreign(f"{section}.{key}") for key in table):
            for key, value in table.items():
                draft.add_unknown(f"{section}.{key}", origin, value)
            return
        near = nearest_section(section)
        near = near or _section_with(table)
        hint = f"did you mean [{near}]?" if near else f"sections are {', '.join(sections())}"
        draft.problems.append(f"unknown section [{section}] ({origin}); {hint}")
        draft.meant.update(f"{near}.{key}" for key in table if near)
        return
    for key, value in table.items():
        name = f"{section}.{key}"
        if isinstance(value, dict) and name not in keys():
            _add_section(draft, origin, name, value)
        else:
            _add_value(draft, origin, name, value)


def _section_with(table: dict[str, Any]) -> str | None:
    """The section that more than half of a table's keys belong to, or None."""
    shared = {section: len(table.keys() & set(section_keys(section))) for section in sections()}
    best = max(shared, key=lambda section: shared[section])
    return best if 2 * shared[best] > len(table) else None


def _add_overrides(draft: _Draft, overrides: list[str] | tuple[str, ...]) -> None:
    seen: dict[str, str] = {}
    for text in overrides:
        name, equals, raw = (part.strip() for part in text.partition("="))
        problem = _override_problem(name, bool(equals), raw)
        if problem is None and name in seen:
            problem = f"override {name} is given twice ({seen[name]} and {raw}); keep one"
        if problem is not None:
            draft.problems.append(problem)
        elif entry := _ENTRY.fullmatch(name):
            seen[name] = raw
            _override_entry(draft, name, entry, raw)
        elif name not in keys():
            draft.add_unknown(name, OVERRIDE, _toml_or_text(raw))
        else:
            seen[name] = raw
            draft.set_value(name, _override_value(name, raw), OVERRIDE)


def _override_entry(draft: _Draft, name: str, entry: re.Match[str], raw: str) -> None:
    """Set one key of one entry of a list of tables, such as optimizer.groups[0].lr_scale."""
    key, number, leaf = entry["key"], int(entry["number"]), entry["leaf"]
    given: Any = draft.values.get(key)
    count = len(given) if isinstance(given, list) else 0
    if key not in keys():
        draft.add_unknown(key, OVERRIDE, raw)
    elif number >= count or not all(isinstance(item, dict) for item in given):
        draft.problems.append(
            f"override {name}: {key} has {number_of(count, 'entry')}; they are counted from 0"
        )
    else:
        changed = {**given[number], leaf: _toml_or_text(raw)}
        draft.set_value(key, [*given[:number], changed, *given[number + 1 :]], OVERRIDE)


def _override_problem(name: str, has_equals: bool, raw: str) -> str | None:
    if name.startswith("--"):
        problem = flag_problem(f"{name}={raw}" if has_equals else name)
        return problem or f"{name} is no setting; settings are written section.key=VALUE"
    if not has_equals or not raw or not name:
        return (
            f"override {name or '='} has no {'value' if name else 'key'}; write section.key=VALUE"
        )
    if name in sections():
        return f"override {name} names a section; write {name}.KEY=VALUE"
    if name == "base":
        return "override base: a base can only be named in a file"
    if not raw.isprintable():
        return f"override {name} has characters that cannot be printed: {raw!r}"
    return None


def _override_value(name: str, raw: str) -> Any:
    """The text as a TOML value; without quotes, a word, or any value of a text key, is a string."""
    key, value = keys()[name], _toml_or_text(raw)
    if key.is_string and not isinstance(value, str):
        return raw
    return _python_value(key, value) if isinstance(value, str) else value


def _python_value(key: Key, text: str) -> Any:
    """The value of a text in Python's spelling, or as a shell leaves it, if the key takes it."""
    if bool in key.kinds and text in ("True", "False"):
        return text == "True"
    bracketed = (text[:1], text[-1:]) in (("(", ")"), ("[", "]"))
    inner = text[1:-1] if bracketed else text
    lists = {list, tuple} if bracketed else {list}
    if key.kinds & lists and (bracketed or "," in inner) and not set("()[]{}") & set(inner):
        return [_toml_or_text(part.strip()) for part in inner.split(",") if part.strip()]
    return text


def _toml_or_text(raw: str) -> Any:
    """The text as a TOML value, or the text itself if it is not TOML."""
    if _BARE_POINT.fullmatch(raw):
        return _number(raw)
    try:
        return tomllib.loads(f"value = {raw}", parse_float=_number)["value"]
    except (ValueError, RecursionError):  # no TOML, or beyond what Python reads
        return raw


def _finish(draft: _Draft) -> LoadedConfig:
    """Validate the values. Raises InvalidSettings with all problems found here and before."""
    wrong = set(draft.meant)
    try:
        config = _validated(draft.values)
    except ValidationError as error:
        wrong |= {split_location(found["loc"])[0] for found in error.errors()}
        draft.problems += explain(error, draft.origins, draft.meant)
    origins = {name: draft.origins.get(name, DEFAULT) for name in keys()}
    if draft.problems:
        stand_ins = [_stand_in(draft.values, wrong, which) for which in (0, -1)]
        made = tuple(LoadedConfig(one, origins) for one in stand_ins if one is not None)
        raise InvalidSettings(draft.problems, frozenset(wrong), made)
    # Some settings follow from others that are written, as train.steps does from train.tokens.
    derived = [n for n in keys() if value_of(config, n) != default_of(config, n)]
    return LoadedConfig(config, origins | {n: DERIVED for n in derived if origins[n] == DEFAULT})


def _validated(values: dict[str, Any]) -> RunConfig:
    # Through JSON, where an array may be a tuple and the types stay strict otherwise.
    return RunConfig.model_validate_json(json.dumps(nested(values), default=str))


def _stand_in(values: dict[str, Any], wrong: set[str], which: int) -> RunConfig | None:
    """The config with other values for settings that are wrong: the first or the last of a few."""
    kept = {name: value for name, value in values.items() if name not in wrong}
    for key in (keys()[name] for name in wrong if name in keys()):
        choices = key.choices or (_NUMBERS if key.required else ())
        kept |= {key.name: choices[which]} if choices else {}
    try:
        return _validated(kept)
    except ValidationError:
        return None


def _syntax_line(path: Path, text: str, message: str) -> str:
    """One line for a TOML error, with the number and text of the line it is on."""
    if path.suffix.lower() in (".yaml", ".yml", ".json", ".py"):
        return f"{path}: a config is a TOML file; write [section] and key = value below it"
    found = re.search(r"\(at line (\d+), column \d+\)", message)
    reason = message.split(" (at ")[0]
    if "overwrite" in reason or "twice" in reason:
        reason = "this key or section is already set further up; keep one"
    if found is None:
        return f"{path}, end of file: {reason}"
    number = int(found.group(1))
    line = text.split("\n")[number - 1].strip()
    return f"{path}, line {number}: {line!r}: {reason}{_syntax_remedy(line)}"


def _syntax_remedy(line: str) -> str:
    """The form to write for a line that is YAML or Python; empty where there is none."""
    key, _, value = re.sub(r"\s+#.*", "", line).partition("=" if "=" in line else ":")
    value = value.strip()
    if not re.fullmatch(r"[\w.-]+\s*", key) or not value:
        return ""
    if value in ("True", "False"):
        value = value.lower()
    elif _BARE_POINT.fullmatch(value):
        value = toml_value(float(value))
    elif re.fullmatch(r"\([^()]*\)", value):
        value = f"[{value[1:-1]}]"
    elif re.fullmatch(r"[A-Za-z][\w./-]*", value):
        value = toml_value(value.lower() if value.lower() in UNSET else value)
    elif "=" in line:
        return ""
    return f"; write {key.strip()} = {value}"
