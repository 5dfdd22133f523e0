"""Completion in the shell: settings, their values and shipped configs for a half-written word.

Where nothing is offered, the shell offers files. The shells' scripts are typer's, which know
nothing of the words of a setting: bash splits them at "=" and ":", so they are joined here; zsh is
told to leave the part before the value alone; fish takes whole words, and offers files behind "=".
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import typer

_ARGS = "_TYPER_COMPLETE_ARGS"  # the line up to the cursor, from zsh and fish

# The end of a line whose last word has a value: what stands before it, and the value's beginning.
_VALUE = re.compile(r"(?<=\s)(--[\w-]+=|[\w.\[\]]+=|file:)([^\s'\"]*)$")


@contextmanager
def shell_words() -> Iterator[str]:
    """Within it typer reads, and prints, the words of the shell that asks for completions.

    Yields the part of the last word that the shell keeps, to be the context's `obj`.
    """
    shell = os.environ.get("_MEGALITE_COMPLETE", "").removeprefix("complete_")
    found = _VALUE.search(os.environ.get(_ARGS, ""))
    before = found[1] if found else ""
    is_option = before.startswith("--")
    if shell == "bash":
        yield _join_words()
    elif shell == "zsh" and found:
        print(f"compset -P '*{before[-1]}';")  # it keeps the part before, as bash does
        if not is_option:  # of an option typer does the same
            os.environ[_ARGS] = found.string[: found.start(1)] + found[2]
        yield "" if is_option else before
    elif shell == "fish" and is_option:
        stdout = sys.stdout
        with redirect_stdout(StringIO()) as words:
            try:
                yield ""
            finally:
                stdout.writelines(f"{before}{line}\n" for line in words.getvalue().splitlines())
    else:
        yield ""


def _join_words() -> str:
    """Join again the words of COMP_WORDS that bash has split at "=" and ":", since typer does not.

    Of the last one only the part that bash replaces is left there; the part before is returned, to
    be the context's `obj`. The name of an option, in `--name=value`, is a word before the last.
    """
    words, kept, after_mark = [""], "", False
    for word in os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]:
        is_mark = word != "" and not word.strip("=:")
        if is_mark or (after_mark and word):
            kept = words[-1] + (word if is_mark else "")
            words[-1] += word
        else:
            kept = ""
            words.append(word)
        after_mark = is_mark

    last = words.pop().removeprefix(kept)
    if kept.startswith("-"):
        option, _, kept = kept.partition("=")
        words.append(option)
    os.environ |= {"COMP_WORDS": "\n".join([*words[1:], last]), "COMP_CWORD": f"{len(words) - 1}"}
    return kept


def completion(words: Callable[[typer.Context, str], Iterable[str]]) -> Callable[..., list[str]]:
    """An `autocompletion` that offers those of words(context, start) that begin with `start`."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        kept = ctx.obj or ""
        start = kept + incomplete
        return [word.removeprefix(kept) for word in words(ctx, start) if word.startswith(start)]

    return complete


def one_of(choices: str) -> Callable[..., list[str]]:
    """An `autocompletion` that offers `choices`, which stand as "a|b" in the option's help."""
    return completion(lambda _ctx, _start: choices.split("|"))


def settings_from(_ctx: typer.Context, start: str) -> list[str]:
    """The settings that begin with `start`. A single one comes with its values.

    With words beside it, the shell adds no space behind the "=".
    """
    from megalite.config.names import keys, toml_value

    name, equals, _ = start.partition("=")
    found = [key for key in keys().values() if key.name.startswith(name)]
    if equals:
        found = [key for key in found if key.name == name]
    if len(found) != 1:
        return [f"{key.name}=" for key in found]

    (key,) = found
    values: tuple[Any, ...] = (True, False) if bool in key.kinds else key.choices or (key.default,)
    if key.choices and key.optional:
        values = (*values, None)
    if key.name == "pipeline.schedule":
        values = (*_schedules(), None)
    given = [toml_value(value) for value in values if value is not None or key.optional]
    words = [f"{key.name}={text.strip(chr(34)).replace(', ', ',')}" for text in given]
    if not equals:
        return [f"{key.name}=", *(words or [f"{key.name}=VALUE"])]
    return words if key.choices or not key.is_string else _with_files(words, start, name + equals)


def accepted_from(_ctx: typer.Context, start: str) -> list[str]:
    """The settings that may be accepted at a resume, behind those that stand in the list."""
    from megalite.config.names import keys
    from megalite.config.resume import ALL_LISTED, DATA, may_change

    before, comma, _ = start.rpartition(",")
    names = [DATA, ALL_LISTED, *(name for name in keys() if may_change(name) == "accept")]
    return [f"{before}{comma}{name}" for name in names]


def _schedules() -> list[str]:
    from megalite.schedules.catalogue import SCHEDULES
    from megalite.schedules.csv_form import FILE
    from megalite.schedules.tune import AUTO

    return [*SCHEDULES, AUTO, FILE]


def runs_from(_ctx: typer.Context, start: str) -> list[str]:
    """The shipped runs, and files that begin with `start`."""
    from megalite.config.shipped import shipped_configs

    return _with_files(
        [one.name for one in shipped_configs().values() if one.kind == "runs"], start
    )


def hardware_from(_ctx: typer.Context, start: str) -> list[str]:
    """The shipped hardware, and files that begin with `start`."""
    from megalite.run.hardware import presets

    return _with_files(presets(), start)


def shipped_from(_ctx: typer.Context, _start: str) -> Iterable[str]:
    """The shipped configs, of every kind."""
    from megalite.config.shipped import shipped_configs

    return shipped_configs()


def _with_files(words: Iterable[str], start: str, before: str = "") -> list[str]:
    """Words and the files that begin with `start`; none if no word does: the shell offers files.

    before: what stands in front of a file's path.
    """
    from glob import escape, glob

    if not any(word.startswith(start) for word in words):
        return []
    paths = glob(escape(start.removeprefix(before)) + "*")
    return [*words, *sorted(f"{before}{path}{'/' * os.path.isdir(path)}" for path in paths)]
