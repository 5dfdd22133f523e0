"""Completion in the shell: in a real bash, and of the whole words that zsh and fish pass."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalite.cli.main import app, main
from tests import ROOT

TAB = b"\t"
ALL = b"\x1b*"  # readline's insert-completions: all that TAB TAB would list
PRINT_LINE = b"\x18\x10"  # the keys that the bash below binds to printing its line
ANSWER_S = 60.0  # bound of one answer of bash


class Bash:
    """An interactive bash in a terminal of its own, with completion of megalite."""

    def __init__(self, folder: Path) -> None:
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "INPUTRC": "/dev/null",
            "TERM": "dumb",
        }
        self._terminal, its_end = pty.openpty()
        command = ["bash", "--noprofile", "--norc", "-i"]
        self._process = subprocess.Popen(
            command,
            stdin=its_end,
            stdout=its_end,
            stderr=its_end,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        os.close(its_end)
        bind = r"""bind -x '"\C-x\C-p": printf "\002%s\003" "$READLINE_LINE"'"""
        self._send(f"{bind}; source <(megalite --show-completion); printf '\\002\\003'\n".encode())
        self._answer()

    def line_after(self, line: str, keys: bytes) -> str:
        """The line that stands there once a line was typed and keys were pressed."""
        erase = b"\x15"
        self._send(erase + line.encode() + keys + PRINT_LINE)
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    def _send(self, typed: bytes) -> None:
        os.write(self._terminal, typed)

    def _answer(self) -> str:
        end, read = time.monotonic() + ANSWER_S, b""
        while b"\3" not in read:
            ready, _, _ = select.select([self._terminal], [], [], max(0, end - time.monotonic()))
            assert ready, f"bash did not answer within {ANSWER_S:.0f} s: {read!r}"
            read += os.read(self._terminal, 4096)
        return read.partition(b"\2")[2].partition(b"\3")[0].decode()


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bash]:
    folder = tmp_path_factory.mktemp("folder")
    for name in ("own.toml", "quick.toml", "nodes.bin", "my runs/run.toml", "texts/a.txt"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    shell = Bash(folder)
    yield shell
    shell.close()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        # Settings: no space behind "=", whether they have a few values, a default or neither.
        ("megalite train q optimizer.lr_s", "megalite train q optimizer.lr_schedule="),
        ("megalite train q data.docu", "megalite train q data.document_masks="),
        ("megalite train q name=a train.global_b", "megalite train q name=a train.global_batch="),
        # Values: bash takes what is behind "=" for a word.
        (
            "megalite plan q optimizer.lr_schedule=cos",
            "megalite plan q optimizer.lr_schedule=cosine ",
        ),
        ("megalite train q data.split=", "megalite train q data.split=[0.98,0.02] "),
        # Names of shipped configs.
        ("megalite train quicks", "megalite train quickstart "),
        ("megalite train --name=mine quicks", "megalite train --name=mine quickstart "),
        ("megalite configs mod", "megalite configs models/"),
        ("megalite plan q --hardware=h2", "megalite plan q --hardware=h200 "),
        # Files, in the same places.
        ("megalite train own", "megalite train own.toml "),
        ("megalite train my", r"megalite train my\ runs/"),
        ("megalite train q data.path=te", "megalite train q data.path=texts/"),
        ('megalite train "my runs/r', 'megalite train "my runs/run.toml" '),
        ('megalite train q data.path="my r', 'megalite train q data.path="my runs"/'),
        ("megalite train q pipeline.schedule=zb-v", "megalite train q pipeline.schedule=zb-v "),
        (
            "megalite train q --accept=train.seed,optimizer.eps",
            "megalite train q --accept=train.seed,optimizer.eps ",
        ),
        ("megalite schedule fil", "megalite schedule file:"),
        ("megalite schedule file:ow", "megalite schedule file:own.toml "),
    ],
)
def test_tab_in_bash(bash: Bash, typed: str, completed: str) -> None:
    assert bash.line_after(typed, TAB) == completed


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("megalite train q", "quick.toml quickstart"),
        ("megalite plan q --hardware h", "h100 h200"),
        ("megalite train q --device ", "auto cpu cuda"),
        ("megalite generate r --device c", "cpu cuda"),
        ("megalite data prepare texts --on-bad ", "fail skip"),
        ("megalite data prepare texts --model-type ", "bpe unigram"),
        ("megalite plan q optimizer.lr_schedule=", "constant cosine inverse_sqrt linear wsd"),
        ("megalite train q data.path=n", "nodes.bin none"),
    ],
)
def test_what_bash_lists(bash: Bash, typed: str, offered: str) -> None:
    line = bash.line_after(typed, ALL)
    stem = typed[: max(typed.rfind(mark) for mark in " =") + 1]
    assert line.startswith(stem)
    assert sorted(line.removeprefix(stem).split()) == offered.split()


def completed(line: str) -> list[str]:
    """The words that fish would offer at the end of a line, as its script asks for them."""
    asked = {
        "_MEGALITE_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": line,
    }
    done = CliRunner().invoke(app, env=asked, prog_name="megalite")
    assert done.exit_code == 0, done.output
    return [word.partition("\t")[0] for word in done.stdout.splitlines() if word]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("megalite d", ["data", "doctor"]),
        ("megalite data in", ["inspect"]),
        ("megalite train --pr", ["--print-config"]),
        (
            "megalite train c.toml train.global_b",
            ["train.global_batch=", "train.global_batch=VALUE"],
        ),
        ("megalite train c.toml train.global_batch=", []),
        ("megalite train c.toml data.pat", ["data.path=", "data.path=none"]),
        ("megalite train c.toml train.deterministic=t", ["train.deterministic=true"]),
        ("megalite train c.toml --lr 3 train.ste", []),  # an unknown option: no error, either
        ("megalite plan c.toml optimizer.lr_schedule=w", ["optimizer.lr_schedule=wsd"]),
        ("megalite plan conf", []),  # the shell offers files
        ("megalite plan c.toml --hardware h2", ["h200"]),
        ("megalite schedule zb-h", ["zb-h1", "zb-h2"]),
        ("megalite schedule pipeline.sche", []),
        ("megalite schedule --config quicks", ["quickstart"]),
        ("megalite schedule --config c.toml parallel.tp", ["parallel.tp=", "parallel.tp=1"]),
        ("megalite data prepare --on-bad ", ["fail", "skip"]),
        (
            "megalite train c.toml pipeline.schedule=zb-h",
            [f"pipeline.schedule=zb-h{n}" for n in (1, 2)],
        ),
        ("megalite train c.toml kernels.norm=", ["kernels.norm=auto", "kernels.norm=apex"]),
        ("megalite train c.toml --accept train.st", ["train.steps"]),
        ("megalite train c.toml --accept data,train.st", ["data,train.steps"]),
        ("megalite train c.toml --accept all", ["all-listed"]),
    ],
)
def test_whole_words(line: str, offered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert completed(line) == offered


@pytest.mark.parametrize(
    ("shell", "line", "printed"),
    [
        # fish compares whole words, of options too, and offers files behind "=" itself.
        ("fish", "megalite plan q --hardware=h2", "--hardware=h200\n"),
        ("fish", "megalite plan q optimizer.lr_schedule=w", "optimizer.lr_schedule=wsd\n"),
        ("fish", "megalite train q data.path=te", "\n"),
        # zsh leaves alone what stands before a value, and then offers files or these words.
        (
            "zsh",
            "megalite plan q --hardware=h2",
            "compset -P '*=';\n_arguments '*: :((\"h200\"))'\n",
        ),
        (
            "zsh",
            "megalite plan q optimizer.lr_schedule=w",
            "compset -P '*=';\n_arguments '*: :((\"wsd\"))'\n",
        ),
        ("zsh", "megalite train q data.path=te", "compset -P '*=';\n_files\n"),
        ("zsh", "megalite schedule file:ow", "compset -P '*:';\n_files\n"),
        ("zsh", "megalite train quicks", "_arguments '*: :((\"quickstart\"))'\n"),
    ],
)
def test_the_words_of_a_value_are_those_of_the_shell(
    shell: str,
    line: str,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["megalite"])
    monkeypatch.setenv("_MEGALITE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out == printed


def test_completion_imports_nothing_heavy() -> None:
    code = """
import os, sys
os.environ |= {"_MEGALITE_COMPLETE": "complete_bash", "COMP_WORDS": "megalite\\ntrain\\nc\\ntr"}
os.environ["COMP_CWORD"] = "3"
sys.argv = ["megalite"]
from megalite.cli.main import main
try:
    main()
except SystemExit:
    print([name for name in ("torch", "numpy", "rich.console") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "train.steps=" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
