"""The Dockerfile's promises, read from its text; docs/cluster.md says how it was built."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

from tests import ROOT

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
CODE = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]


def requirements(*arguments: str) -> list[str]:
    command = [sys.executable, str(ROOT / "launch" / "requirements.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_base_is_an_argument_with_a_pinned_default() -> None:
    assert re.fullmatch(r"ARG BASE_IMAGE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", CODE[0])
    assert CODE[1] == "FROM ${BASE_IMAGE}"
    assert "latest" not in "\n".join(CODE)


def test_nothing_installs_torch_or_apex() -> None:
    installs = [line for line in CODE if "pip install" in line]
    assert len(installs) == 2
    for line in installs:
        assert not re.search(r"\b(torch|triton|apex|nvidia)", line)
    assert "--constraint /tmp/pins.txt --requirement /tmp/needed.txt" in installs[0]
    assert "--no-deps ." in installs[1]
    extras = re.findall(r"needed --extra (\S+)", "\n".join(CODE))
    needed = requirements("needed", "--extra", *extras)
    assert not [line for line in needed if re.match(r"(torch|triton|apex|nvidia)\b", line)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["dependencies"]) - set(needed) == {"torch>=2.11"}
    others = set(project["optional-dependencies"]) - {"dev", "docs", "lm-eval", "triton"}
    assert others == set(extras[0].split(","))


def test_what_the_base_has_of_torch_is_pinned_to_itself() -> None:
    import torch

    assert f"torch=={torch.__version__}" in requirements("pins")
    assert requirements("check", "--needs-torch", "1") == []


def test_any_user_can_run_it() -> None:
    assert not [line for line in CODE if line.startswith("USER")]
    assert any("chmod 1777 /workspace" in line for line in CODE)
    assert "ENV HOME=/workspace" in CODE


def test_everything_copied_is_let_into_the_build() -> None:
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copies = [line.split() for line in CODE if line.startswith("COPY")]
    for name in (name for words in copies for name in words[1:-1]):
        assert f"!{name.split('/')[0]}" in allowed
        assert (ROOT / name).exists()
