"""Triton's cache on a host's own disk, and each kernel compiled by one process of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megalite.process.compiled import use_cache_of_host
from megalite.process.launcher import Launch
from tests import ROOT

TWO_HOSTS = Launch(0, 16, 0, 8)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    return tmp_path / f"megalite-triton-{os.getuid()}"


def test_ranks_of_several_hosts_have_a_cache_on_each(temporary: Path) -> None:
    for _ in range(2):
        use_cache_of_host(TWO_HOSTS)
    assert os.environ.pop("TRITON_CACHE_DIR") == str(temporary)
    assert temporary.stat().st_mode & 0o777 == 0o700


def test_one_host_and_a_place_of_the_users_keep_theirs(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache_of_host(Launch(0, 8, 0, 8))
    assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    use_cache_of_host(TWO_HOSTS)
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    assert not temporary.exists()


def test_a_link_in_its_place_is_not_followed(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    temporary.symlink_to(tmp_path / "others")
    use_cache_of_host(TWO_HOSTS)
    assert "TRITON_CACHE_DIR" not in os.environ


def test_what_is_no_folder_in_its_place_ends_nothing(temporary: Path) -> None:
    temporary.write_text("")
    use_cache_of_host(TWO_HOSTS)
    assert "TRITON_CACHE_DIR" not in os.environ


COMPILES = """
import json, sys, time
import torch, triton.knobs
from megalite.kernels.triton.swiglu import swiglu
from megalite.process import compiled
from tests.kernels.aot.kit import recording

compiled._SLOW_S = 0.0
lines, hits = [], []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
compiled.CompileQueue(lines.append).install()
print("ready", flush=True)
sys.stdin.readline()
with recording(90):
    swiglu(torch.empty(8, 64, dtype=torch.bfloat16))
print(json.dumps([hits, lines]), flush=True)
"""


def test_one_process_compiles_and_the_others_find_it(tmp_path: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", COMPILES],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert sorted(hits for hits, _ in found) == [[False], [True]]
    for _, lines in found:
        assert len(lines) == 1
        assert lines[0].startswith("compiling Triton's kernels: 1 kernel in ")
        assert lines[0].endswith(" so far, the last one swiglu_kernel")
