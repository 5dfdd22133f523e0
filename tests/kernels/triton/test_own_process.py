"""Starts the tests of interpreted Triton kernels in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]


@pytest.mark.long
def test_interpreted_kernels() -> None:
    """All tests of this folder pass with TRITON_INTERPRET=1, the memory and race checker on."""
    # -P: the repository root on the path would make kernels/ a package of its own
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-n", "2", "--dist", "loadfile"]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, str(FOLDER)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout


def test_importing_the_kernels_imports_no_triton() -> None:
    code = "import sys, megalite.kernels; print('triton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
