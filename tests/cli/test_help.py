"""The pages of help: every verb has one, with examples that are real."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from megalite.cli.examples import EXAMPLES
from megalite.cli.main import app
from tests import ROOT

RUNS = (
    "configs",
    "plan",
    "schedule",
    "version",
    "train",
)  # cheap; a train example prints its config


def verbs(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every verb and group with the words that call it."""
    command = command or get_command(app)
    yield " ".join(words), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs(inner, (*words, name))


VERBS = dict(verbs())
LINES = [(verb, line) for verb, lines in EXAMPLES.items() for line in lines]


def page(verb: str) -> str:
    done = CliRunner().invoke(app, [*verb.split(), "-h"], prog_name="megalite")
    assert done.exit_code == 0, done.output
    return str(done.output)


def arguments_of(line: str) -> list[str]:
    """What stands behind the command in a line, which a launcher may begin."""
    words = shlex.split(line)
    return words[words.index("megalite") + 1 :]


def test_every_verb_has_examples_and_nothing_else_has() -> None:
    assert EXAMPLES.keys() == VERBS.keys()


@pytest.mark.parametrize("verb", VERBS)
def test_h_is_help_and_ends_with_the_examples(verb: str) -> None:
    done = CliRunner().invoke(app, [*verb.split(), "--help"], prog_name="megalite")
    assert page(verb) == done.output
    examples = done.output.partition("\nExamples:\n")[2].splitlines()
    assert examples == [f"  {line}" for line in EXAMPLES[verb]]


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_is_narrow_and_explains_every_option(verb: str) -> None:
    text = page(verb).partition("\nExamples:\n")[0]
    assert max(map(len, text.splitlines())) <= 80
    assert not [line for line in text.splitlines() if line.endswith("...")][1:], "cut short"
    assert "<" not in text, "a type in place of a name"
    for param in VERBS[verb].params:
        assert param.hidden or (param.help and param.help.endswith((".", ")"))), param.name


def test_the_verbs_are_listed_in_the_order_of_their_use() -> None:
    rows = page("").partition("\nCommands:\n")[2].partition("\n\n")[0].splitlines()
    listed = [row.split()[0] for row in rows]
    assert set(listed) == set(VERBS[""].commands)
    assert listed[:4] == ["train", "data", "configs", "plan"]


@pytest.mark.parametrize(("verb", "line"), LINES)
def test_examples_are_read_by_the_verb_whose_page_they_are_on(verb: str, line: str) -> None:
    command: Any = get_command(app)
    context, arguments = None, arguments_of(line)
    called = []
    while True:
        context = command.make_context(command.name, arguments, parent=context)
        if not hasattr(command, "commands"):
            break
        name, command, arguments = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        called.append(name)
    assert " ".join(called).startswith(verb)
    assert len(EXAMPLES[verb]) <= 4


@pytest.mark.parametrize(("verb", "line"), [pair for pair in LINES if pair[0] in RUNS])
def test_cheap_examples_run(verb: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    more = ["--print-config"] if verb == "train" and "--print-config" not in line else []
    done = CliRunner().invoke(app, [*arguments_of(line), *more])
    assert done.exit_code == 0, done.output
    assert done.stdout


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]


@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["python", "torchrun"])
def test_the_usage_line_names_the_program(launcher: list[str]) -> None:
    words = [*launcher, "-m", "megalite", "train", "-h"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: python -m megalite train [OPTIONS] CONFIG ")
