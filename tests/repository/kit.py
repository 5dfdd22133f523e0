"""`python -m tests.repository.kit > docs/settings.md`: every setting, from config/schema.py itself.

A setting's text is the comment beside it, or else the one above it.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from typing import Any

from pydantic.fields import FieldInfo

from megalite.config import RunConfig, Section
from megalite.config.names import toml_value

HEAD = """\
# Settings

Every setting of a run's TOML file, section by section: its default, what it may be, what it does.
On the command line it is `section.key=value`; `megalite train CONFIG --print-config` shows the
values of a run and where each comes from. A whole number may be written as 1e10, and `~` at the
start of a path is your home. A word of another framework (`--tensor-model-parallel-size`,
`training.local_batch_size`) is answered by the setting that means the same. "Open" means that
megalite finds the value out, from the other settings or the number of processes; `"none"` sets it
open again, and turns off `clip_grad`. A value without a default must be given. Model settings have
the defaults of their family ([families.md](families.md)).
"""


def main() -> None:
    print(reference(), end="")


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, section in sections(RunConfig, ""):
        title = f"[{name}]" if name else "At the top"
        lines = [line.strip() for line in (section.__doc__ or "").strip().splitlines()]
        parts.append(f"\n## {title}\n\n" + "\n".join(lines) + "\n")
        parts.append("\n| setting | default | values | what it does |\n|---|---|---|---|\n")
        comments = comments_of(section)
        for key, info in section.model_fields.items():
            if not section_of(info.annotation):
                parts.append(row(key, info, comments.get(key, "")))
    return "".join(parts)


def sections(section: type[Section], name: str) -> list[tuple[str, type[Section]]]:
    """A section and those inside it, by dotted name; lists of sections in double brackets."""
    found = [(name, section)]
    for key, info in section.model_fields.items():
        inner = section_of(info.annotation)
        if inner is not None:
            path = f"{name}.{key}" if name else key
            is_list = typing.get_origin(info.annotation) in (list, tuple)
            found += sections(inner, f"[{path}]" if is_list else path)
    return found


def section_of(annotation: Any) -> type[Section] | None:
    """The section class in an annotation, if it is one or a list of one."""
    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def row(key: str, info: FieldInfo, comment: str) -> str:
    default = (
        "given" if info.is_required() else value_text(info.get_default(call_default_factory=True))
    )
    cells = (f"`{key}`", default, values_text(info), comment)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def value_text(value: Any) -> str:
    if value is None:
        return "open"
    return f"`{toml_value(list(value) if isinstance(value, tuple) else value)}`"


def values_text(info: FieldInfo) -> str:
    kinds = [part for part in alternatives(info.annotation) if part is not type(None)]
    texts = []
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            texts += [f"`{toml_value(choice)}`" for choice in typing.get_args(kind)]
        elif typing.get_origin(kind) in (list, tuple):
            texts.append("list")
        else:
            names = {"int": "integer", "float": "number", "str": "text", "bool": "true or false"}
            texts.append(names.get(getattr(kind, "__name__", ""), "value"))
    return ", ".join(texts) + bounds(info)


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


if __name__ == "__main__":
    main()
