"""docs/settings.md: every setting, from config/schema.py itself.

A setting's text is the comment beside it, or else the one above it. A section's example is the end
of its docstring.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
import typing
from typing import Any

from pydantic.fields import FieldInfo

from megalite.config import RunConfig, Section
from megalite.config.names import toml_value

HEAD = """\
# Settings

This page lists every setting of a run's TOML file, section by section: its default, its values, and
what it does. Use it to look a setting up; each section begins with an example. `megalite plan`
prints the memory and time that a config costs ([plan.md](plan.md)). The page is generated from
`megalite/config/schema.py`.

The settings of a run, and where each comes from, are printed by:

```bash
megalite train quickstart --print-config
```

* On the command line a setting is `section.key=value`. In a file, `base = "other.toml"` takes the
  settings of another file first, which may have a base of its own. A config and a base are paths, a
  base's from the folder of the file that names it. If there is no such file, they are names that
  `megalite configs` lists. `megalite configs quickstart > mine.toml` makes a copy.
* A required setting has no default. It is given in the file, its base or on the command line.
* `"none"` means that a setting is not set. The last column says what holds then. In a file,
  `"none"` also removes the value of a base file. An entry of a list (`[[data.sources]]`) leaves a
  setting out instead.
* A whole number may be written as 1e10. `~` at the start of a path is your home.
* Defaults of `[model]` depend on the family ([families.md](families.md)).
* A setting of another framework (`--tensor-model-parallel-size`, `training.local_batch_size`) is
  answered with the one to write here.
"""


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, section in sections(RunConfig, ""):
        text, example = docs_of(section)
        parts.append(f"\n## {f'[{name}]' if name else 'At the top'}\n\n{text}\n")
        parts.append(f"\n```toml\n{example}\n```\n")
        parts.append("\n| setting | default | values | what it does |\n|---|---|---|---|\n")
        comments = comments_of(section)
        in_list = name.startswith("[")
        for key, info in section.model_fields.items():
            # The sections themselves have headings below; a list of tables is a setting too.
            if not section_of(info.annotation):
                parts.append(row(key, info, values_text(info, in_list), comments[key], in_list))
            elif is_list(info.annotation):
                tables = f"tables, written `[[{name}.{key}]]`"
                parts.append(row(key, info, tables, comments[key], in_list))
    return "".join(parts)


def docs_of(section: type[Section]) -> tuple[str, str]:
    """(text, example) of a section's docstring, which ends with a TOML block under "Example:"."""
    text, _, example = inspect.cleandoc(section.__doc__ or "").partition("\nExample:\n")
    return text.strip(), textwrap.dedent(example).strip()


def sections(section: type[Section], name: str) -> list[tuple[str, type[Section]]]:
    """A section and those inside it, by dotted name; lists of sections in double brackets."""
    found = [(name, section)]
    for key, info in section.model_fields.items():
        inner = section_of(info.annotation)
        if inner is not None:
            path = f"{name}.{key}" if name else key
            found += sections(inner, f"[{path}]" if is_list(info.annotation) else path)
    return found


def section_of(annotation: Any) -> type[Section] | None:
    """The section class in an annotation, if it is one or a list of one."""
    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def is_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (list, tuple)


def row(key: str, info: FieldInfo, values: str, comment: str, in_list: bool) -> str:
    default = "required" if info.is_required() else value_text(default_of(info), in_list)
    cells = (f"`{key}`", default, values, comment)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def default_of(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True)


def value_text(value: Any, in_list: bool) -> str:
    if value is None and in_list:
        return "left out"
    return f"`{toml_value(list(value) if isinstance(value, tuple) else value)}`"


def values_text(info: FieldInfo, in_list: bool) -> str:
    names = {"int": "integer", "float": "number", "str": "text", "bool": "`true`, `false`"}
    texts = []
    for kind in alternatives(info.annotation):
        if kind is type(None):
            texts += [] if in_list else ['`"none"`']
        elif typing.get_origin(kind) is typing.Literal:
            texts += [f"`{toml_value(choice)}`" for choice in typing.get_args(kind)]
        elif is_list(kind):
            (item,) = alternatives(typing.get_args(kind)[0])
            if typing.get_origin(item) is typing.Literal:
                shown = ", ".join(f"`{toml_value(choice)}`" for choice in typing.get_args(item))
                texts.append(f"list of {shown}")
            else:
                texts.append(f"list of {names[item.__name__]}{'' if item is str else 's'}")
        else:
            texts.append(names[kind.__name__] + bounds(info))
    return ", ".join(texts)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(part for kind in typing.get_args(annotation) for part in alternatives(kind))
    if typing.get_origin(annotation) is typing.Annotated:
        return alternatives(typing.get_args(annotation)[0])
    return (annotation,)


def bounds(info: FieldInfo) -> str:
    """Its limits, as far as they are ones that a user may meet."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = []
    for limit in info.metadata:
        for name, sign in signs.items():
            value = getattr(limit, name, None)
            if value is not None and abs(value) < 100_000:
                found.append(f"{sign} {value:g}")
    return f" {', '.join(found)}" if found else ""


def comments_of(section: type[Section]) -> dict[str, str]:
    """Field name -> the comment beside its definition, or the ones right above it."""
    above: list[str] = []
    found: dict[str, str] = {}
    key, depth = "", 0
    for line in inspect.getsource(section).splitlines():
        text, _, comment = line.partition("  # ")
        start = re.match(r"    (\w+): ", text)
        if line.strip().startswith("# "):
            above.append(line.strip()[2:])
            continue
        if start and not depth:
            key = start[1]
            found[key] = " ".join(above)
        if key and comment:
            found[key] = comment.strip()
        depth += text.count("(") + text.count("[") - text.count(")") - text.count("]")
        above = []
    return found
