"""Compiles the two libraries that let a torch without CUDA work on cuda tensors, and loads them.

`guard.cpp` makes them possible, for fake tensors and for real ones; `values.cpp` gives the real
ones their operators.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

GUARD, VALUES = (Path(__file__).with_name(name) for name in ("guard.cpp", "values.cpp"))
COMPILER = "g++"


def missing() -> str | None:
    """One line that says why the shim cannot be made here; None if it can."""
    if shutil.which(COMPILER) is None:
        return (
            f"no {COMPILER} here: install it (Debian: apt-get install {COMPILER}), as .ci/run does"
        )
    return None


def build(source: Path, folder: Path) -> Path:
    """The library of a source in `folder`, compiled unless it is there for this torch."""
    content = source.read_bytes() + version("torch").encode()
    library = folder / f"{source.stem}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if library.exists():
        return library

    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch = Path(found.origin).parent
    # Written beside and renamed: another worker of the suite may be doing the same.
    made = library.with_suffix(f".{os.getpid()}")
    command = [COMPILER, "-std=c++20", "-fPIC", "-shared", str(source), "-o", str(made)]
    command += ["-I", str(torch / "include"), "-L", str(torch / "lib"), "-lc10", "-ltorch_cpu"]
    command += [f"-Wl,-rpath,{torch / 'lib'}"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    made.replace(library)
    return library


def load(library: Path) -> None:
    """Load the library of `GUARD` into this process, before torch, whose registries it fills."""
    ctypes.CDLL(str(library))
